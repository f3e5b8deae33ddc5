"""What a plan says: bytes, groups, what is dropped, its inverse's errors, its text, its JSON, its function."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planning.random_plans import run

from orbaxkit import transforms as t
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.planning import Plan, find_scanned, make_plan
from orbaxkit.planning import expressions as ex
from orbaxkit.specs import DTYPES, LeafSpec, Specs

F32 = np.dtype("float32")


def specs_of(**leaves) -> Specs:
    """Leaves by name; a shape alone is float32."""
    made = {n: s if isinstance(s, LeafSpec) else LeafSpec(s, F32) for n, s in leaves.items()}
    return Specs.of((tuple(name.split("/")), spec) for name, spec in made.items())


F6 = specs_of(**{"layers/w": (8, 4, 16), "layers/norm": (8, 4), "embed": (10, 8)})
LAYERS = LeafSpec((27, 64, 32), F32, stored_bytes=27_000, chunk_shape=(1, 64, 32))


def test_three_of_27_layers_read_three_27ths():
    specs = specs_of(**{"layers/w": LAYERS})
    plan = make_plan(
        specs, t.unstack("layers", into="l_{i}", axis=0), t.select("l_{i}/w"), t.select("l_3/w", "l_4/w", "l_20/w")
    )
    assert plan.read_bytes == 3_000
    assert plan.reads == {"layers/w": [tuple(map(slice, (i, 0, 0), (i + 1, 64, 32))) for i in (3, 4, 20)]}


@pytest.mark.parametrize(
    ("chunk", "wanted"),
    [((27, 64, 32), 27_000), ((9, 64, 32), 9_000), ((2, 64, 32), 1_929), (None, 27_000), ((1, 32, 32), 1_000)],
    ids=["one chunk", "nine layers", "uneven", "unchunked", "parts of layers"],
)
def test_bytes_are_those_of_the_chunks_that_are_touched(chunk, wanted):
    spec = LeafSpec((27, 64, 32), F32, stored_bytes=27_000, chunk_shape=chunk)
    plan = make_plan(specs_of(w=spec), t.unstack("w", into="w_{i}", axis=0), t.select("w_5"))
    assert plan.read_bytes == wanted


def test_with_shards_the_inner_chunk_is_the_unit():
    spec = LeafSpec((8, 4), F32, stored_bytes=800, chunk_shape=(1, 4), shard_shape=(8, 4))
    assert make_plan(specs_of(w=spec), t.unstack("w", into="w_{i}", axis=0), t.select("w_5")).read_bytes == 100


def test_columns_of_layers_touch_every_chunk():
    plan = make_plan(specs_of(w=LAYERS), t.split("w", into=["a", "b"], axis=-1), t.select("a"))
    assert plan.read_bytes == 27_000
    assert plan.reads["w"] == [(slice(0, 27), slice(0, 64), slice(0, 16))]


def test_regions_go_through_merged_axes():
    plan = make_plan(
        specs_of(w=(6, 4, 8)), t.reshape("w", "l a b -> (l a) b"), t.split("w", into=["x", "y"], axis=0, sizes=[8, 16])
    )
    assert plan.with_outputs({"x": plan.outputs["x"]}).reads["w"] == [(slice(0, 2), slice(0, 4), slice(0, 8))]


def test_a_leaf_that_only_passes_through_keeps_what_is_known_on_disk():
    specs = specs_of(w=LAYERS)
    assert make_plan(specs, t.rename({"w": "v"})).specs["v"] is specs["w"]


def test_dropped_leaves_are_those_that_nothing_reads():
    plan = make_plan(F6, t.select("layers/*"))
    assert plan.dropped == ("embed",)
    assert plan.inverse().outputs.keys() == {"layers/w", "layers/norm"}


def test_groups_are_outputs_that_share_leaves():
    plan = make_plan(F6, t.unstack("layers", into="l_{i}", axis=1), t.drop("l_2/*", "l_3/*"))
    assert set(map(frozenset, plan.groups)) == {
        frozenset({"l_0/w", "l_1/w"}),
        frozenset({"l_0/norm", "l_1/norm"}),
        frozenset({"embed"}),
    }


def test_an_inverse_names_every_leaf_that_is_lost_and_why():
    plan = make_plan(
        F6,
        t.unstack("layers", into="l_{i}", axis=1),
        t.drop("l_2/w"),
        t.cast("bfloat16", "embed"),
        t.affine("l_0/norm", shift=1),
    )
    with pytest.raises(NotInvertibleError) as caught:
        plan.inverse()
    assert dict(caught.value.leaves) == {
        "embed": "is cast from float32 to bfloat16, which may round in 'embed'",
        "layers/norm": "is scaled or shifted, which rounds in 'l_0/norm'",
        "layers/w": "is read in part only: [0:8, 0:1, 0:16] and elsewhere",
    }


def test_tied_leaves_are_computed_back_once():
    specs = specs_of(embed=(4, 2))
    plan = Plan.identity(specs)
    tied = plan.with_outputs(
        {**plan.outputs, "head": type(plan.outputs["embed"])(("head",), ex.transpose(plan.outputs["embed"].expr))}
    )
    assert tied.then(tied.inverse()) == plan


def test_text_folds_layers_that_are_alike():
    plan = make_plan(
        F6, t.unstack("layers", into="layers_{i}", axis=1), t.drop("layers_3/norm"), t.cast("bfloat16", "layers_{i}/w")
    )
    assert str(plan).splitlines() == [
        "plan: 3 leaves -> 8, reads 2.44 KiB of 2.44 KiB, makes 1.41 KiB",
        "= embed  float32[10, 8]  320 B",
        "~ layers_{0..3}/w = bfloat16(layers/w[:, {0..3}])  bfloat16[8, 16]  x4  1.00 KiB",
        "~ layers_{0..2}/norm = layers/norm[:, {0..2}]  float32[8]  x3  96 B",
    ]


def test_text_folds_what_is_kept_and_dropped_by_subtree():
    leaves = {f"params/layers_{i}/{n}": (2, 2) for i in range(50) for n in "ab"} | {f"opt/{n}": (3,) for n in "xyz"}
    plan = make_plan(specs_of(**leaves), t.select("params/**"), t.fill("params/new", 0.0, shape=(2,), dtype="float32"))
    assert str(plan).splitlines()[1:] == [
        "= params/layers_{0..49}/**  2 leaves  x50  1.56 KiB",
        "+ params/new = 0.0  float32[2]  8 B",
        "- opt/**  3 leaves  36 B",
    ]


def test_text_escapes_names_from_files():
    assert "\x1b" not in str(make_plan(specs_of(**{"a\x1b[31m": (2,)}), t.transpose("*", [0])))


@pytest.mark.parametrize(
    ("rule", "message"),
    [(t.fill("embed", np.ones(3)), "is filled with array"), (t.fill("**", {"new": np.ones(2)}), "without a value")],
    ids=["array", "tree"],
)
def test_a_plan_that_holds_arrays_is_not_written_as_json(rule, message):
    with pytest.raises(TransformError, match=message):
        make_plan(F6, rule).to_json()


def test_json_keeps_stored_facts_and_typed_paths():
    specs = Specs.of([(("blocks", 0, "w"), LAYERS), (("blocks", 1, "w"), LAYERS)], {"blocks": "tuple"})
    plan = make_plan(specs, t.stack("blocks/{i}", into="blocks"))
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.source["blocks/0/w"] == LAYERS


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"nodes": [{"op": "Index", "of": [5], "axis": 0, "i": 0}]},
        {"nodes": [{"op": "Index", "of": [], "axis": 0, "i": 0}]},
        {"nodes": [{"op": "Read", "name": "other"}]},
        {"nodes": [{"op": "Eval", "of": []}]},
        {"outputs": 3},
    ],
    ids=str,
)
def test_json_that_is_no_plan_is_refused(change):
    data = make_plan(F6).to_json() | change
    with pytest.raises(TransformError):
        Plan.from_json(data)


def test_a_function_works_inside_jit_and_under_grad():
    plan = make_plan(F6, t.unstack("layers", into="l_{i}", axis=1), t.transpose("embed"))
    leaves = {name: jnp.ones(spec.shape) for name, spec in F6.leaves.items()}

    def loss(leaves):
        return sum(jnp.sum(x * (k + 1)) for k, x in enumerate(plan.as_function()(leaves).values()))

    grads = jax.jit(jax.grad(loss))(leaves)
    assert {name: g.shape for name, g in grads.items()} == {name: spec.shape for name, spec in F6.leaves.items()}


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({}, "embed: is missing"),
        ({"embed": np.ones((10, 9), np.float32)}, r"embed: is float32\[10, 9\], the plan has float32\[10, 8\]"),
    ],
    ids=["missing", "shape"],
)
def test_a_function_refuses_other_arrays(leaves, message):
    with pytest.raises(TransformError, match=message):
        make_plan(F6, t.select("embed")).as_function()(leaves)


def test_a_function_cannot_check_values():
    plan = make_plan(F6, t.cast("int8", "layers/*"), t.unreplicate("embed"))
    with pytest.raises(TransformError) as caught:
        plan.as_function()
    assert [name for name, _ in caught.value.leaves] == ["layers/w", "layers/norm", "embed"]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_the_host_s_even_where_a_compiler_could_skip_it(name: str):
    x = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32) * 100
    plan = make_plan(specs_of(x=(3, 1000)), t.cast(name, "x"), t.cast("float32", "x"), t.reshape("x", [3000]))
    found = jax.jit(plan.as_function())({"x": x})["x"]
    wanted = run(plan, {"x": x})["x"]
    assert np.asarray(found).tobytes() == wanted.tobytes() == x.astype(DTYPES[name]).astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, np.nan], "int32", "1 of 2 values do not fit in int32, the first is nan"),
        ([300.0, -300.0], "int8", "2 of 2 values do not fit in int8, the first is 300.0"),
        ([2.0**31], "int32", "do not fit in int32"),
        ([-1.0], "uint8", "do not fit in uint8"),
        ([0.5], "bool", "do not fit in bool"),
    ],
    ids=str,
)
def test_values_that_an_integer_cannot_hold_are_refused(values, dtype, message):
    plan = make_plan(specs_of(x=(len(values),)), t.cast(dtype, "x"))
    with pytest.raises(TransformError, match=message):
        run(plan, {"x": np.array(values, np.float32)})


@pytest.mark.parametrize(("value", "wanted"), [(127.9, 127), (-128.9, -128), (-0.0, 0)], ids=str)
def test_floats_are_cut_towards_zero(value, wanted):
    plan = make_plan(specs_of(x=(1,)), t.cast("int8", "x"))
    assert run(plan, {"x": np.array([value], np.float32)})["x"].tolist() == [wanted]


def test_scanned_subtrees_are_found_by_shape():
    specs = specs_of(
        **{
            f"params/layers/{n}": (12, *shape) for n, shape in {"attn/w": (4, 8), "mlp/w": (8, 4), "norm": (8,)}.items()
        },
        **{
            "params/layers/mlp/b": (12, 4),
            "params/embed": (100, 8),
            "params/final/scale": (8,),
            "params/final/bias": (8,),
        },
    )
    assert list(map(str, find_scanned(specs))) == ["params/layers: axis 0 (12 layers)"]
    assert list(map(str, find_scanned(F6))) == ["layers: axis 0 (8 layers) or axis 1 (4 layers)"]


def test_layers_that_are_not_scanned_are_not_reported():
    layer = {
        "attn/q/w": (8, 16, 4),
        "attn/kv/w": (2, 1, 16, 4),
        "mlp/gate": (2, 16, 64),
        "mlp/down": (64, 16),
        "norm/scale": (16,),
    }
    specs = specs_of(**{f"layer_{i}/{n}": shape for i in range(3) for n, shape in layer.items()})
    assert find_scanned(specs) == []
