"""Each transform on small trees: what it makes, how it is undone, and what it refuses, all offenders at once."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from planning.random_plans import run

from orbaxkit import transforms as t
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.planning import Plan, make_plan
from orbaxkit.specs import LeafSpec, Specs

F32 = np.dtype("float32")


def specs_of(leaves) -> Specs:
    """Leaves by name; a shape alone is float32."""
    made = {n: s if isinstance(s, LeafSpec) else LeafSpec(tuple(s), F32) for n, s in leaves.items()}
    return Specs.of((tuple(name.split("/")), spec) for name, spec in made.items())


def specs_for(data) -> Specs:
    """The specs of arrays."""
    return specs_of({name: LeafSpec(x.shape, x.dtype) for name, x in data.items()})


def apply(data, *rules):
    """Plan and evaluate."""
    return run(make_plan(specs_for(data), *rules), data)


F6 = specs_of({"layers/w": (8, 4, 16), "layers/norm": (8, 4), "embed": (10, 8)})


def refused(specs: Specs, *rules) -> TransformError:
    """The error that planning raises."""
    with pytest.raises(TransformError) as caught:
        make_plan(specs, *rules)
    return caught.value


# Patterns


def test_A15_a_pattern_that_matches_nothing_names_the_nearest_paths():
    error = refused(F6, t.rename({"layers/wx": "a", "layers/norm": "b", "embd": "c"}))
    assert dict(error.leaves).keys() == {"layers/wx", "embd"}
    assert "embd: matches nothing; nearest are embed" in str(error)
    assert "where: rename({" in str(error)


def test_a_pattern_that_names_a_subtree_gets_the_pattern_that_would_work():
    error = refused(F6, t.select("layers"))
    assert "hint: 'layers' is a subtree; all leaves below it are 'layers/**'" in str(error)


@pytest.mark.parametrize(
    "rule",
    [
        t.select("x"), t.drop("embed", "x"), t.cast("bfloat16", "x"), t.unstack("x", into="x_{i}"),
        t.stack("x_{i}", into="x"),
        t.split("x", into=["a", "b"], axis=0), t.concat(["x", "y"], into="z", axis=0), t.transpose("x"),
        t.reshape("x", [-1]),
        t.affine("x", scale=2), t.fill("x*", 0), t.fill("x", {"y": 1.0}), t.merge_lora("x", a="x_a", b="x_b"),
        t.unreplicate("x"),
    ],
    ids=lambda rule: rule.verb,
)  # fmt: skip
def test_every_transform_refuses_a_pattern_that_matches_nothing(rule):
    error = refused(F6, rule)
    assert "matches no leaf" in str(error)
    assert f"where: {rule!r}" in str(error)


def test_a_subtree_with_a_typo_gets_the_subtrees_that_are_there():
    assert "layer/**: matches nothing; nearest are layers/**" in str(refused(F6, t.select("layer/**")))


def test_select_and_drop_by_regular_expression():
    plan = make_plan(F6, t.select(re.compile(r"layers/(w|norm)")), t.drop("*/norm"))
    assert list(plan.outputs) == ["layers/w"]


# rename


def test_rename_uses_what_the_pattern_caught_and_keeps_the_type_of_indices():
    specs = Specs.of(
        [(("params", "blocks", 0, "w"), LeafSpec((2,), F32)), (("params", "blocks", 1, "w"), LeafSpec((2,), F32))]
    )
    plan = make_plan(specs, t.rename({"params/blocks/{i}/**": "model/{i}/**"}))
    assert [o.path for o in plan.outputs.values()] == [("model", 0, "w"), ("model", 1, "w")]


def test_rename_moves_tuples_along():
    specs = Specs.of(
        [(("a", "pair", 0), LeafSpec((2,), F32)), (("a", "pair", 1), LeafSpec((2,), F32))], {"a/pair": "tuple"}
    )
    assert make_plan(specs, t.rename({"a/**": "b/c/**"})).containers["b/c/pair"] == "tuple"


def test_rename_by_function():
    plan = make_plan(F6, t.rename(lambda path: path.replace("layers", "blocks")))
    assert list(plan.outputs) == ["blocks/w", "blocks/norm", "embed"]
    error = refused(F6, t.rename(lambda path: None))
    assert len(error.leaves) == 3


def test_two_leaves_under_one_path_are_refused():
    error = refused(F6, t.rename({"layers/{n}": "x"}))
    assert error.leaves == (("x", "comes from layers/w and from layers/norm"),)


def test_a_leaf_inside_another_is_refused():
    assert refused(F6, t.rename({"embed": "layers"})).leaves == (("layers", "is a leaf and has leaves inside"),)


def test_a_rule_behind_a_wider_one_is_refused():
    assert "an earlier rule takes every leaf" in str(refused(F6, t.rename({"**": "a/**", "embed": "e"})))


RENAMES = {
    "swap": {"{a}/{b}": "{b}/{a}"},
    "deep": {"**": "x/**"},
    "literal": {"embed": "table"},
    "part": {"layers/n{x}": "layers/m{x}"},
}


@pytest.mark.parametrize("rules", RENAMES.values(), ids=RENAMES)
def test_renames_are_undone_without_specs(rules):
    rule = t.rename(rules)
    assert make_plan(F6, rule, rule.inverse()) == Plan.identity(F6)
    assert rule.inverse().inverse() == rule


@pytest.mark.parametrize(
    "rule",
    [t.rename({"layers/{x}": "{x}", "{y}": "y"}), t.rename(str.upper), t.rename({re.compile("(?P<a>.*)"): "x/{a}"})],
    ids=str,
)
def test_renames_that_lose_something_are_not_undone(rule):
    with pytest.raises(NotInvertibleError):
        rule.inverse()


# unstack and stack


def test_A40_layer_one_on_axis_one():
    data = {"w": np.arange(24).reshape(2, 3, 4)}
    rule = t.unstack("w", into="w_{i}", axis=1)
    assert apply(data, rule)["w_1"].tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert make_plan(specs_for(data), rule, rule.inverse()) == Plan.identity(specs_for(data))


def test_A41_an_ambiguous_axis_is_never_guessed():
    error = refused(specs_of({"layers/w": (4, 4)}), t.unstack("layers", into="layers_{i}"))
    assert error.leaves == (("layers", "could be axis 0 (4 layers) or axis 1 (4 layers)"),)
    assert "hint: name it: axis=0" in str(error)


def test_F6_lists_both_candidates_and_unstacks_on_the_one_that_is_named():
    error = refused(F6, t.unstack("layers", into="layers_{i}"))
    assert error.leaves == (("layers", "could be axis 0 (8 layers) or axis 1 (4 layers)"),)
    plan = make_plan(F6, t.unstack("layers", into="layers_{i}", axis=1))
    assert [f"{n} {s}" for n, s in plan.specs.items()][:2] == ["layers_0/w float32[8, 16]", "layers_0/norm float32[8]"]
    assert list(plan.outputs)[-1] == "embed"


def test_a_single_candidate_is_taken():
    plan = make_plan(specs_of({"l/w": (8, 4, 16), "l/b": (8, 16)}), t.unstack("l", into="l/{i}"))
    assert [o.path for o in plan.outputs.values()][::2] == [("l", i, "w") for i in range(8)]


def test_leaves_that_disagree_are_all_named():
    specs = specs_of({"l/w": (8, 4), "l/b": (4,), "l/s": ()})
    assert dict(refused(specs, t.unstack("l", into="l_{i}", axis=0)).leaves) == {"l/s": "float32[] has no axis 0"} | {
        "l/w": "has 8 layers on axis 0",
        "l/b": "has 4 layers on axis 0",
    }
    assert refused(specs, t.unstack("l", into="l_{i}")).leaves == (("l/s", "float32[] has no layer axis"),)
    assert "no axis has one size" in str(refused(specs, t.drop("l/s"), t.unstack("l", into="l_{i}")))


def test_the_axis_by_pattern():
    rule = t.unstack("layers", into="layers_{i}", axis={"**/norm": -1, "layers/*": 1})
    plan = make_plan(F6, rule)
    assert plan.specs["layers_3/norm"].shape == (8,)
    assert make_plan(F6, rule, rule.inverse()) == Plan.identity(F6)
    error = refused(F6, t.unstack("layers", into="l_{i}", axis={"**/w": 1}))
    assert error.leaves == (("layers/norm", "no pattern names its axis"),)
    assert "matches nothing" in str(refused(F6, t.unstack("layers", into="l_{i}", axis={"**/v": 1, "**": 1})))


def test_two_towers_are_unstacked_by_one_rule():
    specs = specs_of(
        {
            f"{tower}/layers/{n}": (n_layers, 3, k)
            for tower, n_layers in (("a", 2), ("b", 5))
            for n, k in (("w", 4), ("v", 7))
        }
    )
    rule = t.unstack("*/layers", into="layers_{i}", axis=0)
    plan = make_plan(specs, rule)
    assert len(plan.outputs) == 2 * 2 + 2 * 5
    assert make_plan(specs, rule, rule.inverse()) == Plan.identity(specs)


def test_empty_nodes_are_shared_by_all_layers_and_strings_are_refused():
    none = LeafSpec(kind="empty", empty="None")
    specs = specs_of({"l/w": (2, 3), "l/bias": none})
    rule = t.unstack("l", into="l_{i}", axis=0)
    assert make_plan(specs, rule).specs["l_1/bias"].empty == "None"
    assert make_plan(specs, rule, rule.inverse()) == Plan.identity(specs)
    assert "l/s" in dict(refused(specs_of({"l/w": (2, 3), "l/s": LeafSpec(kind="string")}), rule).leaves)


def test_no_layers_at_all_are_refused():
    assert "has no layers" in str(refused(specs_of({"l/w": (0, 3)}), t.unstack("l", into="l_{i}", axis=0)))


def test_A43_layers_stack_in_numeric_order():
    data = {f"layers_{i}/w": np.full((2,), i, np.float32) for i in (0, 1, 10, 11, *range(2, 10))}
    assert apply(data, t.stack("layers_{i}", into="layers"))["layers/w"][:, 0].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (["0", "2"], "'layers_{i}' has numbers up to 2, but not 1"),
        (["0", "1", "01"], "layers_01: '01' is not a canonical number"),
        (["1", "2"], "but not 0"),
        (["0", "1", "norm"], "layers_norm: 'norm' is not a canonical number"),
    ],
    ids=["gap", "duplicate", "not from 0", "a name"],
)
def test_A43_gaps_and_duplicates_are_refused(numbers, message):
    error = refused(specs_of({f"layers_{n}/w": (2,) for n in numbers}), t.stack("layers_{i}", into="layers"))
    assert message in str(error)


def test_layers_that_lack_a_leaf_or_have_other_shapes_are_all_named():
    specs = specs_of({"l_0/w": (2,), "l_0/b": (2,), "l_1/w": (3,), "l_2/w": (2,), "l_2/c": (1,)})
    found = dict(refused(specs, t.stack("l_{i}", into="l")).leaves)
    assert found == {
        "l_1/b": "is missing, other layers have it",
        "l_2/b": "is missing, other layers have it",
        "l_0/c": "is missing, other layers have it",
        "l_1/c": "is missing, other layers have it",
        "l/w": "shapes differ: float32[2] and float32[3]",
    }


@pytest.mark.parametrize(
    ("rule", "back"),
    [
        (t.stack("p/l_{i}", into="l"), t.unstack("p/l", into="l_{i}", axis=0)),
        (t.stack("p/l/{i}", into="l"), t.unstack("p/l", into="l/{i}", axis=0)),
        (t.stack("p/l/{i}", into="m", levels=1, axis=2), t.unstack("p/l/m", into="{i}", axis=2)),
        (t.stack("{i}", into="l"), t.unstack("l", into="{i}", axis=0)),
        (t.stack("p/l_{i}", into="a/b"), t.unstack("p/a/b", into="l_{i}", axis=0, levels=2)),
    ],
    ids=str,
)
def test_stack_and_unstack_undo_each_other_without_specs(rule, back):
    assert rule.inverse() == back
    assert back.inverse() == rule


def test_an_inferred_axis_is_not_undone_without_specs():
    with pytest.raises(NotInvertibleError, match="the axis was inferred"):
        t.unstack("l", into="l_{i}").inverse()


@pytest.mark.parametrize("into", ["layers", "{i}_{j}", "layers_*"])
def test_a_name_for_layers_needs_one_number(into):
    with pytest.raises(TransformError, match=r"must have one \{i\}"):
        t.unstack("layers", into=into)


def test_A44_1152_outputs_are_planned_quickly():
    import time

    specs = specs_of({f"layers/{k}": (96, 4, k + 1) for k in range(12)})
    start = time.perf_counter()
    plan = make_plan(specs, t.unstack("layers", into="layers_{i}", axis=0))
    assert len(plan.outputs) == 1152
    assert plan.then(plan.inverse()) == Plan.identity(specs)
    assert time.perf_counter() - start < 5


def test_two_levels_come_in_global_order_and_go_back():
    """Gemma's pattern: blocks of three, scanned twice, and two layers that fill no block."""
    data = {f"p/blocks/layers_{j}/w": np.array([[j], [3 + j]], np.float32) for j in range(3)}
    data |= {f"p/rest/layers_{r}/w": np.array([6 + r], np.float32) for r in range(2)}
    rule = t.unstack("p/blocks", into="layers_{i}", axis=0, block="layers_{j}", remainder="rest/layers_{r}")
    out = apply(data, rule)
    assert {name: x.tolist() for name, x in out.items()} == {f"p/layers_{i}/w": [i] for i in range(8)}
    back = t.stack("p/layers_{i}", into="blocks", block="layers_{j}", period=3, remainder="rest/layers_{r}")
    assert back.inverse() == rule
    assert make_plan(specs_for(data), rule, back).outputs == Plan.identity(specs_for(data)).outputs
    assert "period 3; remainder= takes the rest" in str(
        refused(specs_for(out), t.stack("p/layers_{i}", into="b", block="layers_{j}", period=3))
    )


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"blocks/layers_0/w": (2, 1), "blocks/norm": (2, 1)}, "blocks/norm: is not below 'layers_{j}'"),
        ({"blocks/layers_0/w": (2, 1), "blocks/layers_2/w": (2, 1)}, "but not 1"),
        ({"blocks/layers_0/w": (2, 1), "blocks/layers_01/w": (2, 1)}, "canonical"),
    ],
    ids=["outside", "gap", "duplicate"],
)
def test_two_levels_that_are_not_numbered_are_refused(leaves, message):
    assert message in str(refused(specs_of(leaves), t.unstack("blocks", into="l_{i}", axis=0, block="layers_{j}")))


# split and concat


def test_split_and_concat_undo_each_other():
    data = {"attn/qkv/kernel": np.arange(24, dtype=np.float32).reshape(2, 12), "attn/o": np.ones(2, np.float32)}
    rule = t.split("*/qkv/kernel", into=["q/kernel", "k/kernel", "v/kernel"], axis=-1, sizes=[4, 4, 4], levels=2)
    out = apply(data, rule)
    assert out["attn/k/kernel"].tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert rule.inverse() == t.concat(
        ["*/q/kernel", "*/k/kernel", "*/v/kernel"], into="qkv/kernel", axis=-1, sizes=[4, 4, 4], levels=2
    )
    assert rule.inverse().inverse() == rule
    specs = specs_for(data)
    assert make_plan(specs, rule, rule.inverse()) == Plan.identity(specs)
    assert make_plan(specs, rule, rule.inverse()) == make_plan(specs, t.chain(rule, t.chain(rule.inverse())))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (t.split("embed", into=["a", "b", "c"], axis=0), "axis 0 of float32[10, 8] does not divide by 3"),
        (t.split("embed", into=["a", "b"], axis=2), "has no axis 2"),
        (t.split("embed", into=["a", "b"], axis=0, sizes=[3, 6]), "the sizes [3, 6] add up to 9"),
        (t.concat(["layers/w", "layers/norm"], into="x", axis=0), "shapes differ besides axis 0"),
        (t.concat(["{m}/w", "{m}/v"], into="x", axis=0), "no leaf"),
        (t.concat(["embed", "layers/w"], into="x", axis=-1, sizes=[1, 2]), "shapes differ"),
    ],
    ids=str,
)
def test_joins_that_do_not_fit_are_refused(rule, message):
    assert message in str(refused(F6, rule))


def test_a_leaf_without_its_partner_is_refused():
    specs = specs_of({"a/q": (2,), "a/k": (2,), "b/k": (2,), "c/q": (2,)})
    assert refused(specs, t.concat(["{m}/q", "{m}/k"], into="qk", axis=0)).leaves == (
        ("c/k", "is missing beside c/q"),
        ("b/k", "has no partner that '{m}/q' matches"),
    )


# transpose, reshape


@pytest.mark.parametrize("name", ["kernel", "conv", "square"])
def test_A53_kernels_become_torch_weights(name):
    shape = {"kernel": (2, 3), "conv": (3, 3, 4, 8), "square": (4, 4)}[name]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rule = t.transpose("w", (3, 2, 0, 1) if name == "conv" else None)
    out = apply({"w": x}, rule)["w"]
    assert out.shape == {"kernel": (3, 2), "conv": (8, 4, 3, 3), "square": (4, 4)}[name]
    assert (out == (x.transpose(3, 2, 0, 1) if name == "conv" else x.T)).all()
    assert (out != x).any() if name == "square" else True
    assert make_plan(specs_for({"w": x}), rule, rule.inverse()) == Plan.identity(specs_for({"w": x}))


@pytest.mark.parametrize(
    ("text", "sizes", "wanted"),
    [
        ("d (n h) -> d n h", {"n": 4}, lambda x: x.reshape(6, 4, 2)),
        ("d (n h) -> n d h", {"h": 2}, lambda x: x.reshape(6, 4, 2).transpose(1, 0, 2)),
        ("a b -> (b a)", {}, lambda x: x.T.reshape(-1)),
        ("a b -> 1 a (b)", {}, lambda x: x[None]),
    ],
    ids=["split", "split and transpose", "merge", "units"],
)
def test_axis_patterns_are_einops(text, sizes, wanted):
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    rule = t.reshape("w", text, **sizes)
    assert (apply({"w": x}, rule)["w"] == wanted(x)).all()
    back = t.reshape("w", rule.inverse().shape, **dict(sizes) or ({"a": 6} if "(" in text and "1" not in text else {}))
    assert make_plan(specs_for({"w": x}), rule, back) == Plan.identity(specs_for({"w": x}))


@pytest.mark.parametrize(
    "text", ["a b", "a b -> a", "a a -> a", "(a (b)) -> a b", "a b) -> a b", "a -> a -> a", "a ! -> a"]
)
def test_axis_patterns_that_cannot_be_read_are_refused(text):
    with pytest.raises(TransformError, match="axis pattern"):
        t.reshape("w", text)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (t.reshape("embed", "a b c -> a c b"), "has 2 axes"),
        (t.reshape("embed", "a (b c) -> a b c"), "the sizes of b and c are not known"),
        (t.reshape("embed", "a (b c) -> a b c", b=3), "an axis of 8"),
        (t.reshape("embed", "a b -> b a", z=3), "has no axis 'z'"),
        (t.reshape("embed", [3, -1]), "cannot be reshaped to [3, -1]"),
        (t.transpose("embed", (0, 2)), "is not an order"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(rule, message):
    error = refused(F6, rule)
    assert message in str(error)
    assert error.leaves[0][0] == "embed"


def test_a_bare_shape_is_not_undone_without_specs():
    with pytest.raises(NotInvertibleError, match="write it as an axis pattern"):
        t.reshape("w", [-1]).inverse()


# cast, affine, fill, unreplicate


def test_cast_without_a_pattern_takes_floats_only():
    specs = specs_of({"w": (2,), "step": LeafSpec((), np.dtype("int32"), "scalar"), "name": LeafSpec(kind="string")})
    assert {n: s.dtype_name for n, s in make_plan(specs, t.cast("bfloat16")).specs.items()} == {
        "w": "bfloat16",
        "step": "int32",
        "name": "str",
    }
    error = refused(specs, t.cast("bfloat16", "**"))
    assert error.leaves == (("name", "a string cannot be cast to bfloat16"),)


def test_cast_by_the_first_pattern_that_matches():
    plan = make_plan(F6, t.cast({"**/norm": "float32", "layers/*": "bfloat16", "embed": "float8_e4m3fn"}))
    assert [s.dtype_name for s in plan.specs.values()] == ["bfloat16", "float32", "float8_e4m3fn"]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(TransformError, match="there is no dtype 'float12'"):
        t.cast("float12")


def test_affine_is_undone_up_to_rounding():
    data = {"norm": np.array([0.5, -0.25], ml_dtypes.bfloat16)}
    rule = t.affine("norm", scale=2, shift=1)
    assert apply(data, rule)["norm"].tolist() == [2.0, 0.5]
    assert apply(data, rule, rule.inverse())["norm"].tolist() == [0.5, -0.25]
    assert "is not floating-point" in str(
        refused(specs_of({"n": LeafSpec((2,), np.dtype("int32"))}), t.affine("n", shift=1))
    )


def test_fill_with_numbers_arrays_and_trees():
    plan = make_plan(
        F6,
        t.fill("layers/norm", 0.5),
        t.fill("head", np.arange(3, dtype=np.int8)),
        t.fill("new", 1, shape=(2,), dtype="int32"),
        t.fill("other/**", {"scale": np.ones(2, np.float32)}, under="other"),
    )
    assert plan.dropped == ("layers/norm",)
    out = run(plan, {"layers/w": np.ones((8, 4, 16), np.float32), "embed": np.ones((10, 8), np.float32)})
    assert {n: (x.dtype.name, x.shape, x.flat[-1]) for n, x in out.items() if n not in ("layers/w", "embed")} == {
        "layers/norm": ("float32", (8, 4), 0.5),
        "head": ("int8", (3,), 2),
        "new": ("int32", (2,), 1),
        "other/scale": ("float32", (2,), 1),
    }


def test_fill_with_prng_keys():
    jax = pytest.importorskip("jax")
    keys = jax.random.split(jax.random.key(3), 4)
    plan = make_plan(F6, t.fill("rng", keys), t.unstack("rng", into="rng_{i}", axis=0), t.select("rng_2"))
    assert plan.specs["rng_2"].dtype_name == "key<fry>"
    assert (run(plan, {})["rng_2"] == jax.random.key_data(keys[2])).all()
    assert (jax.random.key_data(plan.as_function()({})["rng_2"]) == jax.random.key_data(keys[2])).all()
    assert make_plan(F6, t.fill("rngs/**", {"rngs": {"a": keys}})).specs["rngs/a"].data_shape == (4, 2)


class Source:
    """Arrays in memory as a source to read from."""

    def __init__(self, data):
        self.data, self.specs = data, specs_for(data)


def test_fill_from_another_source_reads_it():
    other = Source({"embed": np.full((10, 9), 7, np.float32)})
    plan = make_plan(
        F6, t.fill("embed", other), t.transpose("embed"), t.split("embed", into=["a", "b"], axis=0, sizes=[1, 8])
    )
    assert plan.dropped == ("embed",)
    assert next((name, found) for (_, name), found in plan.foreign_reads.items()) == (
        "embed",
        [(slice(0, 10), slice(0, 1)), (slice(0, 10), slice(1, 9))],
    )
    assert plan.specs["b"].shape == (8, 10)
    with pytest.raises(TransformError, match="is filled from another source"):
        plan.to_json()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (t.fill("new", 0.0), "is new and needs a shape and a dtype"),
        (t.fill("layers/*", {"layers": {"w": 1.0}}), "layers/norm: is not among the values"),
        (t.fill("embed", 1j), "the value is complex"),
        (t.fill("embed", "text"), "is float32[10, 8]"),
        (t.fill("embed/x", 1, shape=(), dtype="int8"), "embed: is a leaf and has leaves inside"),
        (t.fill("x", 300, shape=(), dtype="int8"), "cannot hold the value"),
    ],
    ids=str,
)
def test_fills_that_do_not_fit_are_refused(rule, message):
    assert message in str(refused(F6, rule))


def test_an_abstract_array_is_no_data():
    jax = pytest.importorskip("jax")
    abstract = jax.ShapeDtypeStruct((10, 8), "float32")
    assert "is no data" in str(refused(F6, t.fill("embed", abstract)))
    assert "is no data" in str(refused(F6, t.fill("embed", {"embed": abstract})))


def test_unreplicate_takes_one_copy_and_checks_that_all_are_equal():
    copies = np.stack([np.array([1.0, np.nan], np.float32)] * 4)
    rule = t.unreplicate("**")
    assert apply({"w": copies}, rule)["w"].tolist()[0] == 1.0
    specs = specs_for({"w": copies})
    plan = make_plan(specs, rule)
    assert plan.then(plan.inverse()) == Plan.identity(specs)
    copies[2, 0] = 2
    with pytest.raises(TransformError, match="copy 2 along axis 0 differs from copy 0"):
        run(plan, {"w": copies})


# merge_lora


def test_A51_lora_merges():
    data = {
        "m/w": np.eye(2, dtype=np.float32),
        "m/lora_a": np.array([[1], [0]], np.float32),
        "m/lora_b": np.array([[0, 2]], np.float32),
    }
    out = apply(data, t.merge_lora("{m}/w", a="{m}/lora_a", b="{m}/lora_b", scale=1))
    assert {n: x.tolist() for n, x in out.items()} == {"m/w": [[1, 2], [0, 1]]}


def test_A51_stacked_lora_merges_per_layer():
    rng = np.random.default_rng(0)
    w, a, b = (rng.normal(size=s).astype(np.float32) for s in ((3, 4, 5), (3, 4, 2), (3, 2, 5)))
    data = {"w": w, "w_lora_a": a, "w_lora_b": b}
    out = apply(data, t.merge_lora("w", a="w_lora_a", b="w_lora_b", scale=0.5))["w"]
    assert np.allclose(out, np.stack([w[i] + 0.5 * a[i] @ b[i] for i in range(3)]), atol=1e-6)


def test_A51_openpi_s_attn_vec_einsum_sums_over_heads():
    """lora.Einsum there computes x·A summed over heads, then ·B summed over heads again."""
    rng = np.random.default_rng(1)
    w, a, b = (rng.normal(size=s).astype(np.float32) for s in ((3, 4, 5), (3, 4, 2), (3, 2, 5)))  # n h d, n h l, n l d
    x = rng.normal(size=(7, 3, 4)).astype(np.float32)
    wanted = np.einsum("tnh,nhd->td", x, w) + 0.5 * np.einsum("tl,nld->td", np.einsum("tnh,nhl->tl", x, a), b)
    rule = t.merge_lora("w", a="w_lora_a", b="w_lora_b", scale=0.5, form="summed_heads")
    merged = apply({"w": w, "w_lora_a": a, "w_lora_b": b}, rule)["w"]
    assert np.allclose(np.einsum("tnh,nhd->td", x, merged), wanted, atol=1e-4)
    assert not np.allclose(np.einsum("tnh,nhd->td", x, w + 0.5 * a @ b), wanted, atol=1e-2)


def test_summed_heads_pull_back_what_they_need():
    specs = specs_of({"w": (6, 3, 4, 5), "lora_a": (6, 3, 4, 2), "lora_b": (6, 3, 2, 5)})
    rule = t.merge_lora("w", a="lora_a", b="lora_b", form="summed_heads")
    plan = make_plan(
        specs, rule, t.unstack("w", into="w_{i}", axis=0), t.unstack("w_2", into="h_{i}", axis=0), t.select("h_1")
    )
    assert plan.reads == {
        "w": [tuple(map(slice, (2, 1, 0, 0), (3, 2, 4, 5)))],
        "lora_a": [tuple(map(slice, (2, 1, 0, 0), (3, 2, 4, 2)))],
        "lora_b": [tuple(map(slice, (2, 0, 0, 0), (3, 3, 2, 5)))],
    }


def test_A51_lora_leaves_that_no_rule_uses_are_refused():
    leaves = {
        "a/w": (2, 2),
        "a/lora_a": (2, 1),
        "a/lora_b": (1, 2),
        "b/gate": (2, 2),
        "b/gate_lora_a": (2, 1),
        "b/gate_lora_b": (1, 2),
    }
    first = {"a": "{m}/lora_a", "b": "{m}/lora_b"}
    error = refused(specs_of(leaves), t.merge_lora("{m}/w", **first))
    assert dict(error.leaves) == {"b/gate_lora_a": "is not used", "b/gate_lora_b": "is not used"}
    second = t.merge_lora("**/gate", a="**/gate_lora_a", b="**/gate_lora_b")
    assert list(make_plan(specs_of(leaves), t.merge_lora("{m}/w", **first, rest="keep"), second).outputs) == [
        "a/w",
        "b/gate",
    ]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"m/w": (2, 2), "m/lora_a": (2, 1)}, "m/lora_b: is missing"),
        ({"m/w": (2, 2), "m/lora_a": (2, 1), "m/lora_b": (2, 2)}, "do not fit the form"),
        ({"m/w": (2, 2), "n/lora_a": (2, 1), "n/lora_b": (1, 2)}, "matches no leaf"),
        ({"m/w": (2, 2), "m/lora_a": (2, 1), "m/lora_b": (1, 2), "n/lora_a": (1, 1)}, "n/lora_a: is not used"),
    ],
    ids=["half", "shapes", "no pair", "left over"],
)
def test_lora_that_does_not_fit_is_refused(leaves, message):
    assert message in str(refused(specs_of(leaves), t.merge_lora("{m}/w", a="{m}/lora_a", b="{m}/lora_b")))


# chain, JSON

RULES = [
    t.select("a/**", re.compile("b.*", re.IGNORECASE)), t.drop("x"), t.rename({"a/{x}": "b/{x}"}), t.cast("bfloat16"),
    t.cast("int8", "a/*"), t.cast({"a": "int8", "b": "float32"}), t.unstack("a/layers", into="l_{i}", axis={"**": 1}),
    t.unstack("a/layers", into="l_{i}", block="j{j}", remainder="r{r}"), t.stack("a/{i}", into="b"),
    t.stack("a/{i}", into="b", levels=1), t.split("a", into=["b", "c"], axis=0),
    t.concat(["a", "b"], into="c", axis=-1, sizes=[1, 2]), t.transpose("a"), t.transpose("a", (1, 0)),
    t.reshape("a", (2, -1)),
    t.reshape("a", "a (b c) -> a b c", b=2), t.affine("a", shift=1), t.fill("a", 0.5),
    t.fill("a", 1, shape=(3,), dtype="int8"),
    t.merge_lora("{m}/w", a="{m}/lora_a", b="{m}/lora_b", scale=0.5, form="summed_heads"), t.unreplicate("a", axis=1),
    t.chain(t.select("**"), t.transpose("*")),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_print_as_the_call_that_makes_them_and_go_through_json(rule):
    names = {verb: getattr(t, verb) for verb in t.reading.VERBS} | {"re": re}
    if "re.compile" not in repr(rule):
        assert eval(repr(rule), names) == rule
    assert t.from_json(json.loads(json.dumps(rule.to_json()))) == rule


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (t.rename(lambda p: p), "rename: holds the function"),
        (t.fill("a", np.ones(2)), "fill: holds <ndarray>"),
        (t.fill("a", {"a": 1}), "fill: holds <dict>"),
        (t.chain(t.drop("a"), t.rename(len)), "rename: holds the function len"),
    ],
    ids=["function", "array", "tree", "in a chain"],
)
def test_what_json_cannot_hold_is_refused_by_name(rule, message):
    with pytest.raises(TransformError, match=message):
        rule.to_json()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"transform": "__import__", "args": ["os"]},
        {"transform": "stack", "args": ["x_{i}"]},
        {"transform": "cast", "options": {"x": 1}},
        [1],
    ],
    ids=str,
)
def test_json_that_is_no_transform_is_refused(data):
    with pytest.raises(TransformError):
        t.from_json(data)


def test_a_chain_is_undone_in_reverse_or_names_what_cannot_be():
    rule = t.chain(t.unstack("layers", into="l_{i}", axis=1), t.rename({"embed": "e"}), t.transpose("e"))
    assert make_plan(F6, rule, rule.inverse()) == Plan.identity(F6)
    with pytest.raises(NotInvertibleError) as caught:
        t.chain(t.select("**"), t.transpose("embed"), t.cast("bfloat16"), len).inverse()
    assert [name for name, _ in caught.value.leaves] == ["<built-in function len>", "cast('bfloat16')", "select('**')"]


def test_any_callable_is_a_transform():
    plan = make_plan(F6, t.chain(lambda plan: plan.with_outputs({}), t.chain()))
    assert not plan.outputs
