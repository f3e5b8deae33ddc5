"""Converting on disk: the same bits as a restore with the same transforms, in bounded memory, nothing half-written."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import f1_tree, f6_tree, save
from flax import nnx
from flax.training.train_state import TrainState

import orbaxkit as ok
from orbaxkit.execute.streaming import output_specs, stream
from orbaxkit.formats.orbax_sink import OrbaxSink

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def big_tree() -> dict[str, Any]:
    """Leaves above the size from which stored values are decoded in order."""
    random = np.random.default_rng(0)
    return {
        "layers": {"w": random.standard_normal((3, 1024, 2048), np.float32)},
        "embed": random.standard_normal((2048, 2100), np.float32),
        "small": np.arange(5),
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    tree = {
        **f6_tree(),
        "half": jnp.asarray([1.5, -0.0, float("nan")], jnp.bfloat16),
        "int4": jnp.asarray([1, -2], jnp.int4),
        "key": jax.random.key(7),
        "none": None,
        "name": "a run",
        "step": 3,
        "list": [np.float32(1.0), {}],
    }
    return {
        "zarr2": save(folder / "zarr2", tree),
        "zarr3": save(folder / "zarr3", tree, use_zarr3=True),
        "plain": save(folder / "plain", tree, use_ocdbt=False),
        "big": save(folder / "big", big_tree()),
    }


def bits(tree: Any) -> dict[str, Any]:
    """Every leaf by path, its type and its bits."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return leaf
        if hasattr(leaf, "dtype") and str(leaf.dtype).startswith("key<"):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return type(leaf).__name__, array.dtype, array.shape, array.tobytes()

    return {jax.tree_util.keystr(path): of(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def assert_same(path: Path, source: Path, *transforms: ok.plan) -> None:
    """What a conversion wrote is what a restore gives."""
    assert bits(ok.restore(path, as_numpy=True)) == bits(ok.restore(source, *transforms, as_numpy=True))
    assert ok.open(path).specs.keys() == ok.plan(ok.open(source), *transforms).specs.keys()


RULES = {
    "identity": (),
    "select": (ok.select("layers/**"),),
    "drop": (ok.drop("embed"),),
    "rename": (ok.rename({"layers/**": "model/blocks/**"}),),
    "unstack": (ok.unstack("layers", into="layer_{i}", axis={"**": 1}),),
    "transpose": (ok.transpose("layers/norm"),),
    "cast": (ok.cast("bfloat16", "layers/**"), ok.cast("float16")),
    "affine": (ok.affine("embed", scale=2.0, shift=1.0),),
    "reshape": (ok.reshape("embed", (4, 20)),),
    "split": (ok.split("embed", into=("a", "b"), axis=0),),
    "fill": (ok.fill("new/head", np.arange(6.0)),),
    "unstack then stack": (
        ok.unstack("layers", into="layer_{i}", axis={"**": 1}),
        ok.stack("layer_{i}", into="layers", axis=0),
    ),
}


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "plain"])
@pytest.mark.parametrize("rule", RULES)
def test_a_conversion_gives_the_bits_of_a_restore(sources: dict[str, Path], tmp_path: Path, format: str, rule: str):
    written = ok.convert(sources[format], tmp_path / "out", *RULES[rule])
    assert written == tmp_path / "out"
    assert_same(written, sources[format], *RULES[rule])


BIG_RULES = {
    "identity": (),
    "cast": (ok.cast("bfloat16"),),
    "unstack": (ok.unstack("layers", into="layer_{i}", axis=0),),
    "unstack along rows": (ok.unstack("layers", into="layer_{i}", axis=1), ok.select("layer_{i}/**", "small")),
    "transpose": (ok.transpose("embed"),),
    "affine": (ok.affine("embed", scale=-1.0),),
}


@pytest.mark.parametrize("limit", [None, "96MB"], ids=["default", "limited"])
@pytest.mark.parametrize("rule", [name for name in BIG_RULES if name != "unstack along rows"])
def test_large_leaves_are_written_in_parts(sources: dict[str, Path], tmp_path: Path, rule: str, limit: str | None):
    written = ok.convert(sources["big"], tmp_path / "out", *BIG_RULES[rule], memory_limit=limit)
    assert_same(written, sources["big"], *BIG_RULES[rule])


def test_stock_orbax_restores_what_was_written(sources: dict[str, Path], tmp_path: Path):
    written = ok.convert(sources["zarr2"], tmp_path / "out", ok.select("layers/**", "half", "step", "key"))
    found = ocp.PyTreeCheckpointer().restore(written)
    assert np.array_equal(found["layers"]["w"], f6_tree()["layers"]["w"])
    assert found["half"].dtype == jnp.bfloat16
    assert found["step"] == 3
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_stored_values_that_do_not_change_are_copied_as_they_are(sources: dict[str, Path], tmp_path: Path, format: str):
    """Not decoded and encoded again: the very bytes."""
    written = ok.convert(sources[format], tmp_path / "out", ok.rename({"layers/**": "model/**"}))
    ours, theirs = (stored_values(path) for path in (written, sources[format]))
    assert ours["model/w"] == theirs["layers/w"]
    assert ours["key"] == theirs["key"]


def stored_values(path: Path) -> dict[str, dict[str, bytes]]:
    """The encoded bytes of every array leaf."""
    source = ok.open(path).source
    out: dict[str, dict[str, bytes]] = {}
    for name, spec in source.specs.items():
        if spec.kind not in ("array", "numpy", "key"):
            continue
        found = source.stored(name)
        out[name] = {}
        for key, value in found.values.items():
            with found.open(value) as file:
                out[name][key] = (
                    file if isinstance(file, bytes) else os.pread(file.fileno(), value.length, value.offset)
                )
    return out


def test_layers_chunked_one_by_one_are_unstacked_without_decoding(tmp_path: Path):
    layers = np.random.default_rng(0).standard_normal((4, 256, 256), np.float32)
    save(tmp_path / "flat", {f"layer_{i}": {"w": layers[i]} for i in range(4)})
    stacked = ok.convert(tmp_path / "flat", tmp_path / "stacked", ok.stack("layer_{i}", into="layers", axis=0))
    assert ok.open(stacked).specs["layers/w"].chunk_shape == (1, 256, 256)
    again = ok.convert(stacked, tmp_path / "again", ok.unstack("layers", into="layer_{i}", axis=0))
    flat = stored_values(tmp_path / "flat")
    assert list(stored_values(stacked)["layers/w"].values()) == [
        next(iter(flat[f"layer_{i}/w"].values())) for i in range(4)
    ]
    assert stored_values(again) == flat
    assert np.array_equal(ok.restore(stacked, as_numpy=True)["layers"]["w"], layers)


def test_a_saved_sharding_stays_where_it_is_still_true(tmp_path: Path):
    mesh = jax.make_mesh((4,), ("model",))
    sharding = jax.NamedSharding(mesh, jax.P("model"))
    save(tmp_path / "in", {"w": jax.device_put(jnp.arange(8.0), sharding)})
    written = ok.convert(tmp_path / "in", tmp_path / "out", ok.cast("bfloat16"))
    specs = ok.open(tmp_path / "in").specs
    assert ok.open(written).specs["w"].sharding == specs["w"].sharding
    assert ok.open(written).specs["w"].chunk_shape == specs["w"].chunk_shape == (2,)


def test_several_items_become_the_first_level(tmp_path: Path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {"params": ocp.args.PyTreeSave({"w": jnp.ones(3)}), "state": ocp.args.PyTreeSave({"step": 5})}
        manager.save(7, args=ocp.args.Composite(**items))
    written = ok.convert(tmp_path / "run", tmp_path / "out")
    assert set(ok.open(written).specs) == {"params/w", "state/step"}
    only = ok.convert(tmp_path / "run", tmp_path / "params", item="params", step=7)
    assert set(ok.open(only).specs) == {"w"}


def test_as_step_writes_a_step_that_a_checkpoint_manager_restores(tmp_path: Path):
    save(tmp_path / "in", f1_tree())
    ok.convert(tmp_path / "in", tmp_path / "run", as_step=3)
    ok.convert(tmp_path / "in", tmp_path / "run", as_step=4)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [3, 4]
        found = manager.restore(4, args=ocp.args.PyTreeRestore())
    assert np.array_equal(found["params"]["dense"]["kernel"], f1_tree()["params"]["dense"]["kernel"])


# Live trees.


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(2, 3, rngs=rngs)


def live_trees() -> Iterator[tuple[str, Any]]:
    params = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": np.ones(3)}}
    yield "params", {**params, "none": None, "nothing": {}, "rng": jax.random.key(1), "name": "x", "lr": 0.1}
    yield "train state", TrainState.create(apply_fn=lambda x: x, params=params, tx=optax.adamw(1e-3))
    yield "nnx", nnx.state(Net(nnx.Rngs(0)))


@pytest.mark.parametrize("tree", [tree for _, tree in live_trees()], ids=[name for name, _ in live_trees()])
def test_a_tree_in_memory_is_written_as_it_is(tree: Any, tmp_path: Path):
    written = ok.convert(tree, tmp_path / "out")
    assert not ok.diff(tree, written, values=True)
    restored = ok.restore(written, target=tree)
    assert bits(restored) == bits(tree)


def test_sharded_device_arrays_are_written_whole(tmp_path: Path):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8), jax.NamedSharding(mesh, jax.P("a", "b")))
    written = ok.convert({"w": w}, tmp_path / "out")
    assert np.array_equal(ok.restore(written, as_numpy=True)["w"], np.asarray(w))


def test_a_description_is_no_source(tmp_path: Path):
    with pytest.raises(ok.CheckpointError, match="w: is a description, not an array"):
        ok.convert({"w": jax.ShapeDtypeStruct((2,), "float32"), "v": jnp.ones(2)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_donated_array_is_no_source(tmp_path: Path):
    w = jnp.ones(2)
    w.delete()
    with pytest.raises(ok.CheckpointError, match="its buffer was donated"):
        ok.convert({"w": w, "v": np.ones(2)}, tmp_path / "out")


# safetensors.


def test_orbax_to_safetensors_and_back_is_the_identity(sources: dict[str, Path], tmp_path: Path):
    without_key = ok.drop("key", "int4")
    there = ok.convert(sources["zarr2"], tmp_path / "there", without_key, format="safetensors")
    assert not ok.diff(sources["zarr2"], there, without_key, values=True)
    back = ok.convert(there, tmp_path / "back")
    assert not ok.diff(sources["zarr2"], back, without_key, values=True)
    assert_same(back, sources["zarr2"], without_key)


def test_A54_bfloat16_stays_bit_for_bit(sources: dict[str, Path], tmp_path: Path):
    from safetensors.flax import load_file

    written = ok.convert(sources["zarr2"], tmp_path / "x.safetensors", ok.select("half"))
    found = load_file(written)["half"]
    assert found.dtype == jnp.bfloat16
    assert np.asarray(found).tobytes() == np.asarray([1.5, -0.0, np.nan], jnp.bfloat16).tobytes()


def test_A50_views_of_any_strides_are_exported_as_what_they_show(tmp_path: Path):
    from safetensors.numpy import load_file

    base = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    views = {"t": base.T, "strided": base[::2, 1::2], "reversed": base[::-1], "wide": np.broadcast_to(base[0], (3, 6))}
    found = load_file(ok.convert(views, tmp_path / "x.safetensors"))
    for name, view in views.items():
        assert np.array_equal(found[name], view), name


def test_A52_tied_leaves_are_written_once_and_come_back_twice(tmp_path: Path):
    from safetensors.numpy import load_file

    e = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    written = ok.convert({"embed": e, "lm_head": e}, tmp_path / "x.safetensors")
    assert set(load_file(written)) == {"embed"}
    back = ok.restore(written, as_numpy=True)
    assert np.array_equal(back["lm_head"], e)


def test_tied_leaves_are_both_written_to_orbax(tmp_path: Path):
    e = np.ones((2, 3), np.float32)
    back = ocp.PyTreeCheckpointer().restore(ok.convert({"a": e, "b": e}, tmp_path / "x"))
    assert np.array_equal(back["a"], back["b"])


def test_shards_are_split_at_the_size_asked_for(tmp_path: Path):
    tree = {f"w{i}": np.full(250, i, np.float32) for i in range(4)}
    written = ok.convert(tree, tmp_path / "hf", format="safetensors", max_shard_size="2KB")
    assert len(list(written.glob("model-*-of-*.safetensors"))) == 2
    assert not ok.diff(tree, written, values=True)


# Refusals and safety.


def test_a_standing_destination_is_refused_and_replaced_only_when_asked(tmp_path: Path):
    save(tmp_path / "in", {"w": np.ones(2)})
    save(tmp_path / "out", {"v": np.zeros(2)})
    with pytest.raises(ok.CheckpointError, match="the destination exists"):
        ok.convert(tmp_path / "in", tmp_path / "out")
    assert set(ok.open(tmp_path / "out").specs) == {"v"}
    ok.convert(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert set(ok.open(tmp_path / "out").specs) == {"w"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("place", ["in", ".", "link"], ids=["itself", "its parent", "a link to it"])
def test_the_source_is_never_overwritten(tmp_path: Path, place: str):
    save(tmp_path / "run" / "in", {"w": np.ones(2)})
    (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "in")
    with pytest.raises(ok.OrbaxkitError, match="the destination is the source, or holds it"):
        ok.convert(tmp_path / "run" / "in", tmp_path / "run" / place, overwrite=True)
    assert np.array_equal(ok.restore(tmp_path / "run" / "in", as_numpy=True)["w"], np.ones(2))


def test_A6_two_paths_with_one_stored_name_are_refused(tmp_path: Path):
    tree = {"a.b": {"c": np.zeros(2)}, "a": {"b.c": np.ones(2)}}
    with pytest.raises(ok.CheckpointError, match=r"a\.b/c: stored as 'a\.b\.c'") as caught:
        ok.convert(tree, tmp_path / "out")
    assert {name for name, _ in caught.value.leaves} == {"a.b/c", "a/b.c"}
    assert list(tmp_path.iterdir()) == []


def test_a_limit_that_cannot_be_kept_is_refused_before_anything_is_written(sources: dict[str, Path], tmp_path: Path):
    """Transposed rows need whole columns, and the one stored value has to be decoded for them."""
    with pytest.raises(ok.OrbaxkitError, match=r"9\.54 MiB of memory are too little\n  embed: needs") as caught:
        ok.convert(sources["big"], tmp_path / "out", ok.transpose("embed"), memory_limit="10MB")
    assert "hint: give more: memory_limit=…, --memory-limit" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_cast_names_the_leaf_and_leaves_nothing(tmp_path: Path):
    save(tmp_path / "in", {"a": np.ones(2, np.float32), "b": np.array([1.0, np.nan], np.float32)})
    with pytest.raises(ok.TransformError, match="1 of 2 values do not fit in int8, the first is nan\n  b"):
        ok.convert(tmp_path / "in", tmp_path / "out", ok.cast("int8", "*"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": "much"}, "memory_limit: 'much' is no size\nhint: like 5GB, 512MiB or a number of bytes"),
        ({"memory_limit": 0}, "memory_limit is 0, and must be at least one byte"),
        ({"format": "safetensors", "as_step": 3}, "safetensors files have no steps"),
        ({"step": 3}, "step= and item= choose from a checkpoint; this is a tree in memory"),
    ],
    ids=["size", "zero", "step of safetensors", "step of a tree"],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ok.OrbaxkitError, match=re.escape(message)):
        ok.convert({"w": np.ones(2)}, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_what_was_announced(sources: dict[str, Path], tmp_path: Path):
    seen: list[tuple[int, int]] = []
    ok.convert(sources["big"], tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 30_000_000
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_error_in_the_callers_function_stops_and_leaves_nothing(sources: dict[str, Path], tmp_path: Path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ok.convert(sources["big"], tmp_path / "out", ok.cast("bfloat16"), progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_specs_announced_are_those_that_come_out(sources: dict[str, Path], tmp_path: Path):
    source = ok.open(sources["zarr2"]).source
    plan = ok.plan(source, ok.unstack("layers", into="l_{i}", axis={"**": 1}))
    sink = OrbaxSink(tmp_path / "out")
    stream(plan, source, sink)
    sink.close()
    announced, found = output_specs(plan, source), ok.open(tmp_path / "out").specs
    assert {n: (s.shape, s.dtype_name) for n, s in announced.items()} == {
        n: (s.shape, s.dtype_name) for n, s in found.items()
    }


def test_arrays_of_the_other_byte_order_keep_their_values(tmp_path: Path):
    tree = {"w": np.arange(6, dtype=">i4").reshape(2, 3), "n": np.float64(1.5), "s": "x" * 40_000}
    for name, format in (("orbax", None), ("safetensors", "safetensors")):
        ok.convert(tree, tmp_path / name, format=format)
        made = ok.restore(tmp_path / name, as_numpy=True)
        np.testing.assert_array_equal(made["w"], tree["w"])
        assert made["s"] == tree["s"]
        assert not ok.diff(tree, tmp_path / name, values=True)
