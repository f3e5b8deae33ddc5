"""Written Orbax items: the same tree to orbaxkit, to TensorStore and to Orbax itself, in every version of its API."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from formats.copying import TreeSource, assert_same, copy_leaf, read, save
from formats.golden_cases import CASES
from formats.test_golden import open_case
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from orbaxkit._checkpoint import open_checkpoint
from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Source
from orbaxkit.formats.ocdbt_writer import OcdbtWriter
from orbaxkit.formats.orbax_sink import OrbaxSettings, OrbaxSink, default_chunks, settings_of
from orbaxkit.formats.sinks import Encoded, Sink
from orbaxkit.specs import DTYPES, LeafSpec

WAYS = {
    "at once": {"part_bytes": 1 << 20},
    "row by row, backwards": {"part_bytes": 8, "reverse": True},
    "as encoded values": {"encoded": True},
}


def written(source: Source, path: Path, *, part_bytes: int = 1 << 20, **how: Any) -> Source:
    save(source, OrbaxSink(path, settings_of(source), part_bytes=part_bytes), **how)
    return open_checkpoint(path).source


# ---- every golden checkpoint


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_is_the_same_tree(case, way, tmp_path):
    for item, source in open_case(case)._sources.items():
        copied = written(source, tmp_path / item, **WAYS[way])
        assert_same(source, copied)
        assert copied.specs.containers == source.specs.containers


def test_chunks_shards_codec_and_saved_shardings_are_kept(tmp_path):
    source = open_case("0.12.8/g_sharded_zarr3").source
    copied = written(source, tmp_path / "out")
    assert settings_of(copied) == settings_of(source) == OrbaxSettings("zarr3", "zstd")
    for name, spec in source.specs.leaves.items():
        found = copied.specs[name]
        assert (found.chunk_shape, found.shard_shape) == (spec.chunk_shape, spec.shard_shape)
        assert found.sharding == spec.sharding


# ---- Orbax reads it


def assert_same_restored(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array):
            assert x.sharding == y.sharding
            assert x.dtype == y.dtype
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def train_state() -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    params = {
        "dense": {"kernel": jnp.arange(24.0).reshape(4, 6), "bias": jnp.zeros(6, jnp.bfloat16)},
        "sharded": jax.device_put(
            jnp.arange(128.0).reshape(16, 8), NamedSharding(mesh, PartitionSpec("data", "model"))
        ),
        "layers": [jnp.full(3, i, jnp.float8_e4m3fn) for i in range(12)],
    }
    return {
        "params": params,
        "opt_state": optax.adam(1e-3).init(params["dense"]),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7, impl="rbg"), 3),
        "step": 7,
        "rate": 0.25,
        "numpy": np.arange(5),
        "nothing": None,
        "zeros": jnp.zeros((2, 2), jnp.int4),
    }


@pytest.fixture(scope="module", params=["zarr", "zarr3"])
def saved(request, tmp_path_factory):
    """What Orbax saved, and our copy of it."""
    folder = tmp_path_factory.mktemp("saved")
    use_zarr3 = request.param == "zarr3"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)) as checkpointer:
        checkpointer.save(folder / "theirs", train_state())
    source = open_checkpoint(folder / "theirs").source
    assert settings_of(source).driver == request.param
    for name in ("as parts", "as encoded values"):
        sink = OrbaxSink(folder / name, settings_of(source), part_bytes=64)
        save(source, sink, encoded=name == "as encoded values")
    return folder


def pytree(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def pytree_to_target(path: Path) -> Any:
    target = train_state()
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(path, item=target, restore_args=args)


def standard(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def standard_to_target(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, train_state()))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("ours", ["as parts", "as encoded values"])
@pytest.mark.parametrize("restore", [pytree, pytree_to_target, standard, standard_to_target, v1.load])
def test_orbax_restores_the_same(restore, ours, saved):
    assert_same_restored(restore(saved / "theirs"), restore(saved / ours))


@pytest.mark.parametrize("restore", [pytree, v1.load])
def test_orbax_restores_strings_and_numbers(restore, tmp_path):
    leaves = {("a", "name"): "π0\n", ("a", "step"): 7, ("b",): 0.5, ("c",): True, ("d",): np.arange(3)}
    save(TreeSource(leaves), OrbaxSink(tmp_path / "out"))
    found = restore(tmp_path / "out")
    assert (found["a"], found["b"], found["c"]) == ({"name": "π0\n", "step": 7}, 0.5, True)
    assert np.array_equal(found["d"], np.arange(3))


def test_orbax_tells_the_same_of_it(saved):
    with ocp.PyTreeCheckpointer() as checkpointer:
        trees = [checkpointer.metadata(saved / name).item_metadata.tree for name in ("theirs", "as parts")]
    facts = [[(m.shape, m.dtype) for m in jax.tree.leaves(tree) if hasattr(m, "shape")] for tree in trees]
    assert facts[0] == facts[1]
    assert len(facts[0]) > 20


def test_a_run_goes_on_with_a_written_step(tmp_path):
    """As `DST/N/default`; Orbax's manager restores it and saves the next step, and leftovers do not disturb it."""
    tree = {"w": np.arange(6.0).reshape(2, 3), "step": 3}
    save(TreeSource({("w",): tree["w"], ("step",): 3}), OrbaxSink(tmp_path, as_step=3))
    (tmp_path / "2.orbaxkit-tmp-abcdefgh" / "default").mkdir(parents=True)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 3
        restored = manager.restore(3, args=ocp.args.StandardRestore())
        assert np.array_equal(restored["w"], tree["w"])
        manager.save(4, args=ocp.args.StandardSave(tree))
    assert open_checkpoint(tmp_path).steps == (3, 4)
    with pytest.raises(CheckpointError, match="the destination exists"):
        OrbaxSink(tmp_path, as_step=3).begin(TreeSource(tree := {("w",): np.ones(1)}).specs)
    save(TreeSource(tree), OrbaxSink(tmp_path, as_step=3, overwrite=True))
    assert open_checkpoint(tmp_path, step=3).specs["w"].shape == (1,)


def test_a_checkpoint_is_no_run(tmp_path):
    save(TreeSource({("w",): np.ones(1)}), OrbaxSink(tmp_path / "bare"))
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        OrbaxSink(tmp_path / "bare", as_step=1).begin(TreeSource({("w",): np.ones(1)}).specs)


def test_custom_metadata_is_kept(tmp_path):
    save(TreeSource({("w",): np.ones(1)}), OrbaxSink(tmp_path / "a", OrbaxSettings(custom_metadata={"by": "me"})))
    source = open_checkpoint(tmp_path / "a").source
    written(source, tmp_path / "b")
    assert json.loads((tmp_path / "b/_METADATA").read_text())["custom_metadata"] == {"by": "me"}


# ---- TensorStore reads and changes it


def store_at(path: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()


def contents(store: ts.KvStore) -> dict[bytes, bytes]:
    return {key: store.read(key).result().value for key in store.list().result()}


@given(
    values=st.dictionaries(st.text("ab/.é", max_size=12), st.integers(0, 1500), max_size=60),
    node_bytes=st.sampled_from([1, 300, 1 << 18]),
    children=st.sampled_from([2, 3, 1024]),
)
@settings(max_examples=60)
def test_tensorstore_reads_any_keys_in_trees_of_any_height(values, node_bytes, children, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    writer = OcdbtWriter(str(path), node_bytes, children)
    data = {key: bytes([i % 251]) * length for i, (key, length) in enumerate(values.items())}
    for key, value in data.items():
        writer.put(key, value)
    writer.close()
    assert contents(store_at(path)) == {key.encode(): value for key, value in data.items()}


@pytest.mark.parametrize("node_bytes", [1 << 18, 400], ids=["one node", "many nodes"])
def test_tensorstore_appends_and_deletes(node_bytes, tmp_path):
    writer = OcdbtWriter(str(tmp_path), node_bytes, 4)
    expected = {f"k{i:03}".encode(): b"%d" % i * 700 for i in range(0, 200, 2)}
    for key, value in expected.items():
        writer.put(key.decode(), value)
    writer.close()
    store = store_at(tmp_path)
    for key in (b"a", b"k001", b"k099", b"z"):
        store.write(key, b"new" * 900).result()
        expected[key] = b"new" * 900
    store.delete_range(ts.KvStore.KeyRange("k050", "k090")).result()
    expected = {key: value for key, value in expected.items() if not b"k050" <= key < b"k090"}
    assert contents(store_at(tmp_path)) == expected
    store.delete_range(ts.KvStore.KeyRange("", "")).result()
    assert contents(store_at(tmp_path)) == {}


def test_values_written_at_the_same_time_lie_in_one_piece(tmp_path):
    writer = OcdbtWriter(str(tmp_path))
    values = [writer.start(f"v{i}") for i in range(3)]
    for i, part in itertools.product(range(3), (b"a" * 900, b"b" * 900, b"c")):
        values[i].write(part)
    for value in values:
        value.finish()
    writer.close()
    assert set(contents(store_at(tmp_path)).values()) == {b"a" * 900 + b"b" * 900 + b"c"}
    assert len(list((tmp_path / "d").iterdir())) == 3


def test_two_values_with_one_key_are_refused(tmp_path):
    writer = OcdbtWriter(str(tmp_path))
    writer.put("a", b"x")
    with pytest.raises(CheckpointError, match="two values have the key 'a'"):
        writer.put("a", b"y")
    writer.discard()


def tensorstore_array(path: Path, name: str, driver: str) -> np.ndarray:
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, open=True).result().read().result()


STORABLE = sorted(set(DTYPES) - {"uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"})


@pytest.mark.parametrize("codec", ["zstd", "raw"])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_A54_every_dtype_keeps_its_bits(driver, codec, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for name in STORABLE:
        dtype = DTYPES[name]
        raw = rng.integers(0, 256, (3, 5, dtype.itemsize), np.uint8)
        is_small = dtype.itemsize == 1 and not name.startswith(("float8", "uint8", "int8"))
        arrays[name,] = (raw[..., 0] & 1).astype(dtype) if is_small else raw.reshape(3, -1).view(dtype)
    save(TreeSource(arrays), OrbaxSink(tmp_path / "out", OrbaxSettings(driver, codec)))
    source = open_checkpoint(tmp_path / "out").source
    for (name,), array in arrays.items():
        theirs = tensorstore_array(tmp_path / "out", name, driver)
        assert theirs.dtype == array.dtype
        assert theirs.tobytes() == read(source, name).tobytes() == array.tobytes(), name


@given(data=st.data(), driver=st.sampled_from(["zarr", "zarr3"]), codec=st.sampled_from(["zstd", "raw"]))
@settings(max_examples=60)
def test_any_grid_and_any_parts_give_the_array(data, driver, codec, tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "out"
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    chunks = tuple(data.draw(st.integers(1, 8)) for _ in shape)
    per_shard = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    shards = tuple(c * n for c, n in zip(chunks, per_shard, strict=True)) if data.draw(st.booleans()) else None
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    spec = LeafSpec(shape, array.dtype, chunk_shape=chunks, shard_shape=shards)
    source = TreeSource({("w",): array}, {("w",): spec})
    sink = OrbaxSink(path, OrbaxSettings(driver, codec), part_bytes=data.draw(st.integers(1, 200)))
    save(source, sink)
    assert np.array_equal(tensorstore_array(path, "w", driver), array)
    opened = open_checkpoint(path).source
    assert np.array_equal(read(opened, "w"), array)
    assert opened.problems(["w"]) == []
    assert opened.specs["w"].chunk_shape == chunks
    assert opened.specs["w"].shard_shape == (shards if driver == "zarr3" else None)


@pytest.mark.parametrize(
    "view",
    [
        np.arange(24.0).reshape(4, 6).T,
        np.arange(24.0).reshape(4, 6)[::-1, ::2],
        np.broadcast_to(np.arange(6.0), (4, 6)),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
    ],
    ids=["transposed", "reversed and strided", "broadcast", "fortran"],
)
def test_A50_views_are_written_as_they_read(view, tmp_path):
    sink = OrbaxSink(tmp_path / "out")
    sink.begin(TreeSource({("w",): view}).specs)
    (spans,) = sink.parts("w")
    sink.write("w", spans, view)
    sink.close()
    assert np.array_equal(tensorstore_array(tmp_path / "out", "w", "zarr"), view)


def test_zero_size_arrays_are_kept_and_orbax_reads_them(tmp_path):
    save(TreeSource({("w",): np.zeros((0, 4), np.float32), ("v",): np.ones(1)}), OrbaxSink(tmp_path / "out"))
    assert open_checkpoint(tmp_path / "out").specs["w"].shape == (0, 4)
    assert pytree(tmp_path / "out")["w"].shape == (0, 4)


# ---- what is refused, before anything is written


def refusal(leaves: dict, tmp_path: Path, changes: dict | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        OrbaxSink(tmp_path / "out").begin(TreeSource(leaves, changes).specs)
    assert list(tmp_path.iterdir()) == []
    return caught.value


def test_A6_two_paths_with_one_stored_name_are_both_named(tmp_path):
    error = refusal({("a.b", "c"): np.zeros(2), ("a", "b.c"): np.ones(2), ("x",): np.ones(1)}, tmp_path)
    assert [name for name, _ in error.leaves] == ["a.b/c", "a/b.c"]
    assert "stored as 'a.b.c'" in str(error)
    assert "ok.rename" in str(error)


@pytest.mark.parametrize("second", [np.ones(1), "text", 3], ids=["an array", "a string", "a number"])
def test_A6_counts_for_every_kind_of_leaf(second, tmp_path):
    assert len(refusal({("a.0",): np.ones(1), ("a", 0): second}, tmp_path).leaves) == 2


def test_what_tensorstore_cannot_store_is_named(tmp_path):
    leaves = {("a",): np.ones(2, ml_dtypes.uint4), ("b",): np.ones(1)}
    assert "a: uint4 is no dtype of TensorStore" in str(refusal(leaves, tmp_path))
    assert "its dtype is not known" in str(refusal({("a",): np.ones(1)}, tmp_path, {("a",): LeafSpec((1,))}))
    assert "leads out of the checkpoint" in str(refusal({("../a",): np.ones(1)}, tmp_path))


def test_more_than_the_disk_holds_is_refused(tmp_path):
    huge = LeafSpec((1 << 50,), np.dtype("float32"))
    assert "bytes of disk are free" in str(refusal({("a",): np.ones(1)}, tmp_path, {("a",): huge}))


# ---- how a sink is used


@pytest.fixture
def sink(tmp_path) -> Sink:
    out = OrbaxSink(tmp_path / "out", part_bytes=16)
    spec = LeafSpec((4, 4), np.dtype("float32"), chunk_shape=(2, 4))
    out.begin(TreeSource({("w",): np.ones(1), ("s",): "text", ("n",): 3}, {("w",): spec}).specs)
    return out


def test_a_checkpoint_that_is_not_whole_is_not_put_in_place(sink, tmp_path):
    sink.value("n", 3)
    with pytest.raises(CheckpointError, match="the checkpoint is not whole") as caught:
        sink.close()
    assert [name for name, _ in caught.value.leaves] == ["w", "s"]
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_parts_of_a_stored_value_come_in_order(sink):
    parts = list(sink.parts("w"))
    assert parts == [((i, i + 1), (0, 4)) for i in range(4)]
    sink.write("w", parts[2], np.ones((1, 4), np.float32))  # another stored value may come first
    with pytest.raises(ValueError, match="come in order"):
        sink.write("w", parts[1], np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="is not a part"):
        sink.write("w", parts[0], np.ones((1, 4)))
    sink.abort()


def test_encoded_values_are_taken_only_where_they_are_the_same_bytes(tmp_path):
    source = open_case("0.12.8/x_mgr_metrics").source
    name = "Dense_0/kernel"
    array = source.places[name].array
    for how, same in [
        (settings_of(source), True),
        (OrbaxSettings("zarr", "raw"), False),
        (OrbaxSettings("zarr3"), False),
    ]:
        sink = OrbaxSink(tmp_path / "out", how)
        sink.begin(source.specs)
        assert sink.accepts_encoded(name, array) is same
        assert not sink.accepts_encoded("Dense_0/bias", array)
        sink.abort()


def test_a_value_whose_file_is_cut_short_is_not_copied(tmp_path):
    source = TreeSource({("w",): np.arange(1000)})
    (tmp_path / "short").write_bytes(b"x" * 1500)
    sink = OrbaxSink(tmp_path / "out")
    sink.begin(source.specs)
    with open(tmp_path / "short", "rb") as file, pytest.raises(CheckpointError, match="should reach byte 2,500"):
        sink.write_encoded("w", "0", Encoded(2000, file, offset=500))
    with pytest.raises(CheckpointError, match="its stored value 0 is empty"):
        sink.write_encoded("w", "0", Encoded(0, b""))
    sink.abort()


def test_leaves_written_by_turns_are_each_whole(tmp_path):
    """Big chunks of several leaves at once: as when layers are cut out of a stack, part by part."""
    arrays = {(f"w{i}",): np.random.default_rng(i).normal(size=(64, 32)) for i in range(3)}
    source = TreeSource(arrays)
    sink = OrbaxSink(tmp_path / "out", part_bytes=1 << 12)
    sink.begin(source.specs)
    parts = {name: list(sink.parts(name)) for name in source.specs}
    for i in range(len(parts["w0"])):
        for name in parts:
            sink.write(name, parts[name][i], read(source, name, parts[name][i]))
    sink.close()
    assert_same(source, open_checkpoint(tmp_path / "out").source)


def test_memory_stays_small_however_big_a_leaf_is(tmp_path):
    import tracemalloc

    row = np.random.default_rng(0).normal(size=(1, 1 << 16)).astype(np.float32)
    spec = LeafSpec((128, 1 << 16), row.dtype)
    sink = OrbaxSink(tmp_path / "out", part_bytes=row.nbytes)
    sink.begin(TreeSource({("w",): row}, {("w",): spec}).specs)
    tracemalloc.start()
    for spans in sink.parts("w"):
        sink.write("w", spans, row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sink.close()
    assert peak < spec.nbytes / 16
    assert open_checkpoint(tmp_path / "out").specs["w"].chunk_shape == spec.shape


def test_leaves_without_a_wish_are_one_chunk_of_at_most_a_gibibyte():
    assert default_chunks((), 4) == ()
    assert default_chunks((0, 3), 4) == (1, 3)
    assert default_chunks((1 << 14, 1 << 14), 4) == (1 << 14, 1 << 14)
    assert default_chunks((10, 1 << 15, 1 << 15), 4) == (1, 1 << 13, 1 << 15)


def test_a_grid_that_would_store_far_more_than_the_array_is_not_kept(tmp_path):
    source = TreeSource({("w",): np.ones(3)}, {("w",): LeafSpec((3,), np.dtype("float64"), chunk_shape=(1 << 40,))})
    assert written(source, tmp_path / "out").specs["w"].chunk_shape == (3,)


def test_stored_values_of_golden_files_are_found(tmp_path):
    """The encoded way is really taken: the copy's values are the source's bytes."""
    source = open_case("0.12.8/x_mgr_metrics").source
    sink = OrbaxSink(tmp_path / "out", settings_of(source))
    sink.begin(source.specs)
    assert all(sink.accepts_encoded(name, source.places[name].array) for name in source.specs)
    for name in source.specs:
        copy_leaf(source, sink, name, encoded=True)
    sink.close()
    copied = open_checkpoint(tmp_path / "out").source
    for name in source.specs:
        bits = []
        for one in (source, copied):
            (value,) = one.store.values(one.places[name].name).values()
            with one.store.open(value) as file:
                bits.append(file if isinstance(file, bytes) else (file.seek(value.offset), file.read(value.length))[1])
        assert bits[0] == bits[1]
