"""Safetensors: read and written as the library does, trees come back whole, and bad files are one clear error each."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

import orbaxkit as ok
from orbaxkit.formats.flat import BLOCK_BYTES, read_region
from orbaxkit.formats.safetensors_header import NAMES
from orbaxkit.specs import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
SHAPES = [(), (0,), (3, 0, 2), (1,), (2, 3), (2, 3, 4, 5)]


def any_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every bit pattern that a dtype has: NaN payloads, -0.0, subnormal numbers."""
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    data = np.random.default_rng(seed).bytes(size)
    return np.frombuffer(bytes(b & 1 for b in data) if dtype == "bool" else data, DTYPES[dtype]).reshape(shape)


def all_dtypes(names: Any = NAMES) -> dict[str, np.ndarray]:
    return {f"{name}.{i}": any_bits(name, shape, i) for name in names for i, shape in enumerate(SHAPES)}


def as_bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(array)
    return array.dtype.name, array.shape, array.tobytes()


def read_all(path: Path) -> dict[str, Any]:
    """Every leaf by its path, as the source gives it."""
    source = ok.open(path).source
    out: dict[str, Any] = {}
    for name, spec in source.specs.items():
        if spec.kind in ("string", "empty"):
            out[name] = spec.empty if spec.kind == "empty" else source.value(name)
            continue
        data = np.empty(spec.shape, spec.dtype)
        source.read(name, tuple(slice(0, size) for size in spec.shape), data).result()
        out[name] = data
    return out


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the library finds in a file, byte by byte."""
    return {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in deserialize(path.read_bytes())
    }


def in_folder(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in tensors_of(file).items()}


# The library as the oracle.


def test_every_dtype_and_shape_that_is_written_is_what_the_library_reads(tmp_path: Path):
    tree = all_dtypes()
    found = tensors_of(ok.convert(tree, tmp_path / "x.safetensors"))
    assert found == {name: (NAMES[array.dtype.name], array.shape, array.tobytes()) for name, array in tree.items()}


def test_every_dtype_and_shape_that_the_library_writes_is_read(tmp_path: Path):
    tree = all_dtypes()
    save_file(tree, tmp_path / "x.safetensors")
    found = read_all(tmp_path / "x.safetensors")
    assert {name.replace("/", "."): as_bits(data) for name, data in found.items()} == {
        name: as_bits(data) for name, data in tree.items()
    }


def test_A54_every_dtype_goes_through_convert_and_restore_uncast(tmp_path: Path):
    tree = {name: any_bits(name, (5, 3)) for name in NAMES}
    save_file(tree, tmp_path / "x.safetensors")
    again = ok.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    assert tensors_of(again) == tensors_of(tmp_path / "x.safetensors")
    restored = ok.restore(again, as_numpy=True)
    assert {name: as_bits(restored[name]) for name in tree} == {name: as_bits(tree[name]) for name in tree}


def test_the_data_lies_where_the_library_maps_it_aligned(tmp_path: Path):
    """Wide elements first, from a multiple of eight bytes on."""
    tree = {"a": np.ones(3, np.int8), "b": np.ones(3, np.float64), "c": np.ones(3, np.float16), "text": "x"}
    written = ok.convert(tree, tmp_path / "x.safetensors")
    length = int.from_bytes(written.read_bytes()[:8], "little")
    header = json.loads(written.read_bytes()[8 : 8 + length])
    for name in "abc":
        assert (8 + length + header[name]["data_offsets"][0]) % tree[name].dtype.itemsize == 0
    assert safe_open(written, "numpy").metadata()["format"] == "pt"


def test_numbers_of_the_other_byte_order_are_stored_as_the_format_has_it(tmp_path: Path):
    tree = {"a": np.arange(3, dtype=">i4"), "b": np.array([1.5, -2.0], ">f8")}
    found = load_file(ok.convert(tree, tmp_path / "x.safetensors"))
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"].tolist() == [1.5, -2.0]


# Shards.

SHARDED = {f"layer.{i}.w": any_bits("bfloat16", (16, 8), i) for i in range(7)} | {"step": np.int64(4)}


def sharded(folder: Path) -> Path:
    """A folder in Hugging Face's layout, by the library; the files in an order that is not that of the names."""
    folder.mkdir()
    groups = [list(SHARDED)[i::3] for i in range(3)]
    places = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: np.asarray(SHARDED[name]) for name in names}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in SHARDED.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("is_indexed", [True, False], ids=["index", "no index"])
def test_a_sharded_folder_is_read_whole_and_by_slice(tmp_path: Path, is_indexed: bool):
    folder = sharded(tmp_path / "hf")
    if not is_indexed:
        (folder / "model.safetensors.index.json").unlink()
    source = ok.open(folder).source
    assert {n.replace("/", "."): as_bits(v) for n, v in read_all(folder).items()} == {
        n: as_bits(v) for n, v in SHARDED.items()
    }
    out = np.empty((3, 5), ml_dtypes.bfloat16)
    source.read("layer/4/w", (slice(2, 5), slice(3, 8)), out).result()
    assert out.tobytes() == SHARDED["layer.4.w"][2:5, 3:8].tobytes()
    assert source.notes == ()


def test_a_part_of_a_sharded_folder_opens_only_the_files_it_needs(tmp_path: Path):
    """The other shards' data is gone once they were opened, and nothing asks for it."""
    folder = sharded(tmp_path / "hf")
    source = ok.open(folder).source
    os.truncate(folder / "model-00001-of-00003.safetensors", 8)
    out = np.empty((16, 8), ml_dtypes.bfloat16)
    source.read("layer/1/w", (slice(0, 16), slice(0, 8)), out).result()
    assert out.tobytes() == SHARDED["layer.1.w"].tobytes()
    with pytest.raises(ok.CheckpointError, match=r"layer/0/w: model-00001-of-00003\.safetensors is cut short"):
        source.read("layer/0/w", (slice(0, 16), slice(0, 8)), out).result()


@settings(max_examples=150)
@given(data=st.data())
def test_every_region_of_a_flat_array_is_what_numpy_cuts_out(tmp_path_factory: pytest.TempPathFactory, data: Any):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    spans = [tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    assert_region(tmp_path_factory.getbasetemp() / "flat", shape, spans)


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        ((3, BLOCK_BYTES // 4 + 5), [(1, 3), (7, 20)]),
        ((2, 3, BLOCK_BYTES // 8), [(0, 2), (1, 3), (0, 5)]),
        ((5, 100, 20_000), [(1, 4), (10, 90), (3, 17_000)]),
        ((3000, 1500), [(2, 2999), (1, 1499)]),
    ],
    ids=["rows above a block", "planes above a block", "long runs", "several blocks"],
)
def test_regions_of_large_arrays(tmp_path: Path, shape: tuple[int, ...], spans: list[tuple[int, int]]):
    assert_region(tmp_path / "flat", shape, spans)


def assert_region(path: Path, shape: tuple[int, ...], spans: list[tuple[int, int]]) -> None:
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    path.write_bytes(b"head!" + whole.tobytes())
    wanted = whole[tuple(slice(*span) for span in spans)]
    out = np.full(wanted.shape, -1, np.int32)
    with open(path, "rb") as file:
        read_region(file.fileno(), 5, shape, spans, out)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("limit", [1, 999, 1000, 2500, 10**9])
def test_no_shard_is_above_the_size_asked_for_unless_one_tensor_is(tmp_path: Path, limit: int):
    tree = {f"w{i}": any_bits("uint8", (size,), i) for i, size in enumerate([500, 500, 1, 1200, 0, 800, 700, 700])}
    written = ok.convert(tree, tmp_path / "hf", format="safetensors", max_shard_size=limit)
    files = sorted(written.glob("*.safetensors"))
    for file in files:
        sizes = [len(data) for _, _, data in tensors_of(file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert in_folder(written) == {k: ("U8", v.shape, v.tobytes()) for k, v in tree.items()}
    assert (written / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert not ok.diff(tree, written, values=True)


def test_the_index_says_where_each_tensor_is_and_how_much_there_is(tmp_path: Path):
    written = ok.convert(SHARDED, tmp_path / "hf", format="safetensors", max_shard_size=600)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in SHARDED.values())
    assert index["weight_map"].keys() == SHARDED.keys()
    count = len(set(index["weight_map"].values()))
    assert count == 4
    for name, file in index["weight_map"].items():
        assert re.fullmatch(rf"model-0000\d-of-0000{count}\.safetensors", file)
        assert tensors_of(written / file)[name][2] == SHARDED[name].tobytes()


# A50, A52, A54.


def views() -> dict[str, Any]:
    base = np.arange(120.0, dtype=np.float32).reshape(4, 5, 6)
    wide = np.broadcast_to(np.float32(3), (2, 3))
    return {
        "transposed": base.T,
        "axes swapped": base.swapaxes(0, 1),
        "strided": base[::2, 1::3, 4:0:-2],
        "reversed": base[::-1, ::-1, ::-1],
        "broadcast": wide,
        "broadcast rows": np.broadcast_to(base[0, 0], (3, 6)),
        "Fortran": np.asfortranarray(base),
        "one of many": base[2, 3, 4:5],
        "without axes": base[1, 2, 3, ...],
        "read only": np.frombuffer(base.tobytes(), np.float32)[::-1],
        "bfloat16": base.astype(ml_dtypes.bfloat16).T[::-1],
        "diagonal": np.einsum("iij->ij", base[:, :4]),
        "jax": jnp.asarray(base).T,
        "window": np.lib.stride_tricks.sliding_window_view(base[0, 0], 3),
    }


@pytest.mark.parametrize("limit", [None, "4KB"], ids=["at once", "in parts"])
def test_A50_live_arrays_of_any_strides_are_written_as_what_they_show(tmp_path: Path, limit: str | None):
    written = ok.convert(views(), tmp_path / "x.safetensors", memory_limit=limit)
    found = tensors_of(written)
    for name, view in views().items():
        assert found[name][1:] == (view.shape, np.asarray(view).tobytes()), name


def test_A52_ties_are_written_once_noted_and_recreated(tmp_path: Path):
    e = any_bits("bfloat16", (4, 2))
    written = ok.convert({"embed": e, "lm_head": e, "other": e.copy()}, tmp_path / "x.safetensors")
    assert tensors_of(written).keys() == {"embed", "other"}
    assert safe_open(written, "numpy").metadata()["lm_head"] == "embed"
    source = ok.open(written).source
    assert source.tied == {"lm_head": "embed"}
    assert "lm_head is tied to embed" in source.notes
    assert {name: as_bits(v) for name, v in read_all(written).items()} == dict.fromkeys(
        ["embed", "lm_head", "other"], as_bits(e)
    )
    again = ok.convert(written, tmp_path / "y.safetensors")
    assert tensors_of(again).keys() == {"embed", "other"}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}], ids=["bare", "with a format"])
def test_A52_ties_that_the_library_noted_are_recreated(tmp_path: Path, metadata: dict[str, str]):
    e = any_bits("float32", (4, 2))
    save_file({"model.embed": e}, tmp_path / "x.safetensors", metadata={"lm_head.w": "model.embed", **metadata})
    found = read_all(tmp_path / "x.safetensors")
    assert {name: as_bits(v) for name, v in found.items()} == dict.fromkeys(["lm_head/w", "model/embed"], as_bits(e))


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "different"])
def test_A52_both_of_a_tie_may_be_there_if_they_are_the_same(tmp_path: Path, is_same: bool):
    a = any_bits("float32", (4, 2))
    b = a if is_same else a[::-1].copy()
    path = tmp_path / "x.safetensors"
    save_file({"embed": a, "lm_head": b.copy()}, path, metadata={"lm_head": "embed"})
    if is_same:
        assert as_bits(read_all(path)["lm_head"]) == as_bits(a)
        return
    problem = "it is noted as tied to embed, and both are here with different values"
    assert ok.open(path).source.problems(["embed", "lm_head"]) == [("lm_head", problem)]
    for use in (ok.restore, lambda path: ok.convert(path, tmp_path / "out")):
        with pytest.raises(ok.CheckpointError, match=f"lm_head: {problem}"):
            use(path)
    assert not (tmp_path / "out").exists()


def test_A52_a_ring_of_ties_is_checked_like_any_other(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(2), "b": np.ones(2)}, path, metadata={"a": "b", "b": "a"})
    assert [name for name, _ in ok.open(path).source.problems(["a", "b"])] == ["a", "b"]


def test_the_format_that_the_metadata_names_is_no_tie(tmp_path: Path):
    save_file({"pt": np.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert set(ok.open(tmp_path / "x.safetensors").specs) == {"pt"}


def test_tied_leaves_may_have_the_names_of_metadata(tmp_path: Path):
    e = np.ones(2, np.float32)
    written = ok.convert({"a": e, "format": e, "orbaxkit": e}, tmp_path / "x.safetensors")
    assert safe_open(written, "numpy").metadata()["format"] == "pt"
    assert set(read_all(written)) == {"a", "format", "orbaxkit"}


# What safetensors cannot hold.


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        (jnp.zeros(2, jnp.int4), "has the dtype int4"),
        (jax.random.key(0), "is a PRNG key (threefry2x32)"),
        (np.zeros(2, np.complex128), "has the dtype complex128"),
        (np.zeros(2, ml_dtypes.float8_e3m4), "has the dtype float8_e3m4"),
        (np.array(["a", "bc"]), "has the dtype str64"),
        (np.array([b"a", b"bc"]), "has the dtype bytes16"),
        (np.array([None, 1]), "has the dtype object"),
        (np.array(["2020"], "datetime64[Y]"), "has the dtype datetime64[Y]"),
    ],
    ids=["int4", "key", "complex128", "float8_e3m4", "strings", "bytes", "objects", "dates"],
)
def test_what_safetensors_have_no_dtype_for_is_refused_by_leaf(tmp_path: Path, leaf: Any, problem: str):
    with pytest.raises(ok.CheckpointError, match=re.escape(f"a/0: {problem}")) as caught:
        ok.convert({"a": [leaf], "b": np.ones(2)}, tmp_path / "x.safetensors")
    assert [name for name, _ in caught.value.leaves] == ["a/0"]
    assert "ok.drop" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [("__metadata__", "is its metadata"), ("a\0b", "holds NUL"), ("a\ud800", "is no Unicode text")],
    ids=["metadata", "NUL", "surrogate"],
)
def test_names_that_the_library_would_not_read_are_refused(tmp_path: Path, name: str, problem: str):
    with pytest.raises(ok.CheckpointError, match=f"safetensors cannot hold these names\n.*: {problem}"):
        ok.convert({name: np.ones(2), "b": np.ones(2)}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "a run", '\x01"\\' * 900, "é\U0001f600" * 200, "\ud800\0\n"], ids=repr)
def test_strings_travel_in_the_metadata(tmp_path: Path, text: str):
    item = ok.convert({"s": text, "t": [text, np.ones(2)]}, tmp_path / "item") if "\ud800" not in text else None
    for source in filter(None, [{"s": text, "t": [text, np.ones(2)]}, item]):
        written = ok.convert(source, tmp_path / "x.safetensors", overwrite=True)
        assert tensors_of(written).keys() == {"t.1"}
        assert [read_all(written)[name] for name in ("s", "t/0")] == [text, text]


# There and back.


def typed_tree() -> dict[str, Any]:
    return {
        "params": {"layers.0": {"w.b": any_bits("bfloat16", (4, 3)), "c": jnp.ones((2, 2), jnp.float8_e5m2)}},
        "list": [np.arange(3), [np.float32(1.5), None], {}],
        "tuple": (np.ones((1, 2), np.float16), (jnp.zeros(()), 7)),
        "scalars": {"int": 3, "float": 0.5, "bool": True, "np": np.int16(-4), "zero d": np.array(2.0)},
        "empty": {"none": None, "dict": {}, "list": [], "tuple": ()},
        "text": "a run",
        "0": {"10": np.ones(2), "9": np.zeros(1)},
        "": {"a/b": np.ones(1, np.bool_)},
        "none": np.zeros((0, 4), np.int8),
    }


def test_orbax_to_safetensors_to_orbax_is_the_identity(tmp_path: Path):
    first = ok.convert(typed_tree(), tmp_path / "first")
    there = ok.convert(first, tmp_path / "there.safetensors")
    back = ok.convert(there, tmp_path / "back")
    before, after = ok.open(first).specs, ok.open(back).specs
    assert after.paths == before.paths
    assert list(after) == list(before)
    assert after.containers == before.containers
    assert dict(after) == dict(before)
    assert_same_values(read_all(first), read_all(back))
    for name in ("_METADATA", "_sharding"):
        assert json.loads((back / name).read_text()) == json.loads((first / name).read_text())


def assert_same_values(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = value == second[name] if isinstance(value, str) else as_bits(value) == as_bits(second[name])
        assert same, name


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["zarr2", "zarr3"])
def test_an_item_that_orbax_wrote_comes_back_as_orbax_reads_it(tmp_path: Path, use_zarr3: bool):
    import orbax.checkpoint as ocp

    tree = {k: v for k, v in typed_tree().items() if k not in ("", "none")}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)) as checkpointer:
        checkpointer.save(tmp_path / "first", args=ocp.args.PyTreeSave(tree))
    back = ok.convert(ok.convert(tmp_path / "first", tmp_path / "there", format="safetensors"), tmp_path / "back")
    ours, theirs = (ocp.PyTreeCheckpointer().restore(path) for path in (back, tmp_path / "first"))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        assert a == b if isinstance(a, str) else as_bits(a) == as_bits(b)
    assert not ok.diff(tmp_path / "first", back, values=True)


def test_safetensors_to_orbax_to_safetensors_keeps_every_byte(tmp_path: Path):
    tree = all_dtypes()
    save_file(tree, tmp_path / "x.safetensors")
    item = ok.convert(tmp_path / "x.safetensors", tmp_path / "item")
    assert tensors_of(ok.convert(item, tmp_path / "y.safetensors")) == tensors_of(tmp_path / "x.safetensors")


def test_a_sharded_folder_through_orbax_keeps_every_byte(tmp_path: Path):
    folder = sharded(tmp_path / "hf")
    item = ok.convert(folder, tmp_path / "item")
    again = ok.convert(item, tmp_path / "again", format="safetensors", max_shard_size=600)
    assert in_folder(again) == in_folder(folder)
