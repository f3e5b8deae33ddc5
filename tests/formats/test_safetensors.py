"""Safetensors: read and written as the library does, trees come back whole, and bad files are one clear error each."""

import json
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
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
        read_region(file, 5, shape, spans, out)
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


# Bad input.


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def error_of(path: Path, use: Callable[[Path], Any] = ok.restore) -> str:
    """One short error, that of opening or of reading; never any other exception, nor a chain of them."""
    with pytest.raises(ok.CheckpointError) as caught:
        use(path)
    text = str(caught.value)
    assert len(text) < 1000
    assert text.count("\n") < 8
    assert caught.value.__cause__ is None
    return text


TWO = {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 2, 4)}
DATA = b"\1\2\3\4"
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "one name twice": (
        file_bytes(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{}}', DATA),
        "the key 'a' comes twice",
    ),
    "one key of an entry twice": (
        file_bytes(b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', DATA),
        "the key 'dtype' comes twice",
    ),
    "overlapping": (file_bytes(TWO | {"b": entry("U8", [3], 1, 4)}, DATA), "the tensor 'b' shares bytes with another"),
    "the same bytes": (file_bytes(TWO | {"b": entry("U8", [2], 0, 2)}, DATA), "'b' shares bytes with another"),
    "past the end": (file_bytes(TWO | {"b": entry("U8", [7], 2, 9)}, DATA), "is cut short: it should reach byte"),
    "far past the end": (
        file_bytes({"a": entry("F32", [1 << 50], 0, 1 << 52)}, DATA),
        "is cut short: it should reach byte",
    ),
    "negative": (file_bytes(TWO | {"b": entry("U8", [2], -2, 0)}, DATA), "data_offsets of 'b' is not a list of sizes"),
    "backwards": (file_bytes(TWO | {"b": entry("U8", [2], 4, 2)}, DATA), "'b' has -2 bytes for uint8[2]"),
    "a hole": (file_bytes({"b": TWO["b"]}, DATA), "the tensor 'b' leaves 2 bytes unused"),
    "a rest": (file_bytes({"a": TWO["a"]}, DATA), "the file has 2 bytes that belong to no tensor"),
    "data without tensors": (file_bytes({}, DATA), "the file has 4 bytes that belong to no tensor"),
    "length 2**60": (file_bytes(TWO, DATA, 1 << 60), "is no safetensors file: it does not begin with a header"),
    "length 2**64 - 1": (file_bytes(TWO, DATA, (1 << 64) - 1), "is no safetensors file"),
    "length 0": (file_bytes(TWO, DATA, 0), "is no safetensors file"),
    "length past the end": (file_bytes(TWO, DATA, 10_000), "is cut short: its header ends at byte 10,008 of"),
    "length too small": (file_bytes(TWO, DATA, 20), "is not valid JSON"),
    "length into the data": (file_bytes(TWO, DATA, len(json.dumps(TWO)) + 3), "is not valid JSON"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "is no safetensors file"),
    "no JSON": (file_bytes(b"{hello}"), "is not valid JSON"),
    "two documents": (file_bytes(b"{}{}"), "is not valid JSON"),
    "no UTF-8": (file_bytes(b'{"\xff": {}}'), "is not valid JSON"),
    "a list": (file_bytes([TWO], DATA), "is no safetensors file"),
    "a number": (file_bytes(b"12345678"), "is no safetensors file"),
    "deep lists": (file_bytes(b'{"a":' + b"[" * 100_000), "is nested too deeply"),
    "deep objects": (file_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "is nested too deeply"),
    "a number of 10,000 digits": (file_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "is not valid JSON"),
    "unknown dtype": (file_bytes({"a": entry("F128", [1], 0, 16)}, bytes(16)), "dtype that is not known here: F128"),
    "packed dtype": (file_bytes({"a": entry("F4", [2], 0, 1)}, b"a"), "'a' has a dtype that is not known here: F4"),
    "dtype of numpy": (file_bytes({"a": entry("<f4", [1], 0, 4)}, DATA), "dtype that is not known here: <f4"),
    "dtype a list": (file_bytes({"a": entry(["U8"], [4], 0, 4)}, DATA), "the header has a malformed entry: 'a'"),  # type: ignore[arg-type]
    "dtype a number": (file_bytes({"a": entry(8, [4], 0, 4)}, DATA), "dtype that is not known here: 8"),  # type: ignore[arg-type]
    "too few bytes": (file_bytes({"a": entry("F32", [2], 0, 4)}, DATA), "'a' has 4 bytes for float32[2]"),
    "too many bytes": (file_bytes({"a": entry("U8", [2, 1], 0, 4)}, DATA), "'a' has 4 bytes for uint8[2, 1]"),
    "bytes for none": (file_bytes({"a": entry("U8", [0, 4], 0, 4)}, DATA), "'a' has 4 bytes for uint8[0, 4]"),
    "an overflowing shape": (file_bytes({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}), "bytes for uint8[4294967296,"),
    "an empty array above all memory": (
        file_bytes({"a": entry("U8", [1 << 40, 0, 1 << 40], 0, 0)}),
        "'a' has a shape that no array has",
    ),
    "a size of 2**64": (file_bytes({"a": entry("U8", [1 << 64], 0, 4)}, DATA), "is not a list of sizes"),
    "a size with a fraction": (file_bytes({"a": entry("U8", [4.0], 0, 4)}, DATA), "is not a list of sizes"),
    "a size that is true": (file_bytes({"a": entry("U8", [True, 4], 0, 4)}, DATA), "is not a list of sizes"),
    "forty axes": (file_bytes({"a": entry("U8", [1] * 39 + [4], 0, 4)}, DATA), "is not a list of sizes"),
    "three offsets": (
        file_bytes({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, DATA),
        "the header has a malformed entry: 'a'",
    ),
    "no offsets": (file_bytes({"a": {"dtype": "U8", "shape": [4]}}, DATA), "the header has a malformed entry: 'a'"),
    "no entry": (file_bytes({"a": None}, DATA), "the header has a malformed entry: 'a'"),
    "metadata of numbers": (file_bytes(TWO | {"__metadata__": {"step": 3}}, DATA), "__metadata__ is not a JSON object"),
    "metadata a list": (file_bytes(TWO | {"__metadata__": ["pt"]}, DATA), "__metadata__ is not a JSON object"),
    "a name with NUL": (file_bytes({"a\0": entry("U8", [4], 0, 4)}, DATA), "a tensor's name holds NUL"),
    "a name of half a character": (
        file_bytes({"\ud800": entry("U8", [4], 0, 4)}, DATA),
        "a tensor's name is no Unicode text",
    ),
    "a million dots": (
        file_bytes({"a" + "." * 1_000_000: entry("U8", [4], 0, 4)}, DATA),
        "names have more than 200 parts",
    ),
    "a root among others": (file_bytes({"": TWO["a"], "b": TWO["b"]}, DATA), "its names make no tree"),
    "a pointer of Git LFS": (LFS, "is a Git LFS pointer, not the data"),
    "nothing": (b"", "is no safetensors file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_error_that_names_it(tmp_path: Path, case: str):
    data, problem = BAD_FILES[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with within_memory(20 * len(data) + (1 << 20)):
        text = error_of(path)
    assert problem in text
    assert "x.safetensors" in text


@contextmanager
def within_memory(most: int) -> Iterator[None]:
    """Nothing is allocated that a lying size asks for."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most


@pytest.mark.parametrize("case", BAD_FILES)
def test_the_library_refuses_what_is_refused_here(tmp_path: Path, case: str):
    """But for names, of which we need a tree, and for nested metadata that it does not look at."""
    if case in ("packed dtype", "a million dots", "a root among others", "a name with NUL", "forty axes"):
        pytest.skip("the format allows it")
    (tmp_path / "x.safetensors").write_bytes(BAD_FILES[case][0])
    with pytest.raises((SafetensorError, ValueError, OSError)):
        load_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path: Path, form: str):
    folder = tmp_path / "hf"
    whole = ok.convert({"a": np.arange(3)}, folder / "x.safetensors").read_bytes()
    path = folder / "x.safetensors" if form == "file" else folder
    assert len(whole) < 600
    for size in {*range(0, len(whole), 13), *range(7, 10), *range(len(whole) - 25, len(whole))}:
        (folder / "x.safetensors").write_bytes(whole[:size])
        assert "x.safetensors" in error_of(path)


def with_index(folder: Path, places: Any, **files: bytes) -> Path:
    """A folder of an index and two shards, `a` in one and `b` in two."""
    folder.mkdir()
    held = {"one": file_bytes({"a": TWO["a"]}, DATA[:2]), "two": file_bytes({"b": TWO["a"]}, DATA[2:])} | files
    for name, data in held.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    index = places if isinstance(places, bytes) else json.dumps({"weight_map": places}).encode()
    (folder / "model.safetensors.index.json").write_bytes(index)
    return folder


GOOD_INDEX = {"a": "one.safetensors", "b": "two.safetensors"}


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "one.safetensors\0", "a/../../x.safetensors", "..", "sub/..", "./../x"],
)
def test_an_index_leads_to_no_file_outside_its_folder(tmp_path: Path, file: str):
    (tmp_path / "x.safetensors").write_bytes(file_bytes({"b": TWO["a"]}, b"no"))
    folder = with_index(tmp_path / "hf", GOOD_INDEX | {"b": file})
    text = error_of(folder)
    assert "leads out of the checkpoint" in text
    assert f"where: {folder}/model.safetensors.index.json" in text


def test_a_symlink_that_an_index_names_is_followed(tmp_path: Path):
    folder = with_index(tmp_path / "hf", GOOD_INDEX)
    (folder / "two.safetensors").rename(tmp_path / "blob")
    (folder / "two.safetensors").symlink_to("../blob")
    assert read_all(folder)["b"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "file",
    ["", "three.safetensors", "x" * 300, "\ud800", "sub", "pipe"],
    ids=["none", "absent", "too long", "half a character", "folder", "pipe"],
)
def test_a_missing_shard_is_named_and_the_others_can_be_read(tmp_path: Path, file: str):
    folder = with_index(tmp_path / "hf", GOOD_INDEX | {"b": file})
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    source = ok.open(folder).source
    assert source.problems(["a", "b"]) == [("b", f"{file} is missing")]
    assert any("files are missing" in note for note in source.notes)
    assert "b: " in error_of(folder)
    assert ok.restore(folder, ok.select("a"), as_numpy=True)["a"].tolist() == [1, 2]


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path):
    folder = with_index(tmp_path / "hf", GOOD_INDEX | {"c": "two.safetensors"})
    assert "c: two.safetensors does not hold 'c'" in error_of(folder)
    assert "c: two.safetensors does not hold 'c'" in error_of(folder, lambda path: ok.convert(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_two_shards_that_hold_one_name_are_refused_without_an_index(tmp_path: Path):
    folder = with_index(tmp_path / "hf", GOOD_INDEX, two=file_bytes(TWO, DATA))
    source = ok.open(folder).source
    assert "a of one.safetensors is read, not that of two.safetensors: so the index says" in source.notes
    (folder / "model.safetensors.index.json").unlink()
    text = error_of(folder)
    assert "two.safetensors and one.safetensors both hold 'a'" in text
    assert f"where: {folder}" in text


def test_a_git_lfs_pointer_in_place_of_a_shard_is_named(tmp_path: Path):
    text = error_of(with_index(tmp_path / "hf", GOOD_INDEX, two=LFS))
    assert "two.safetensors is a Git LFS pointer, not the data" in text
    assert "git lfs pull" in text


@pytest.mark.parametrize("kind", [case for case in BAD_FILES if case not in ("a million dots", "a root among others")])
def test_a_bad_shard_is_one_error_that_names_it(tmp_path: Path, kind: str):
    data, _ = BAD_FILES[kind]
    assert "two.safetensors" in error_of(with_index(tmp_path / "hf", GOOD_INDEX, two=data))


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (b"", "is empty"),
        (LFS, "is a Git LFS pointer"),
        (b"[]", "holds no weight_map"),
        (b"{}", "holds no weight_map"),
        (b'{"weight_map": ["one.safetensors"]}', "holds no weight_map"),
        (b'{"weight_map": {"a": 1}}', "holds no weight_map"),
        (b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "the key 'a' comes twice"),
        (b'{"weight_map": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"weight_map": {"a', "is not valid JSON"),
        (b'{"weight_map": {"a' + b"." * 1000 + b'": "one.safetensors"}}', "names have more than 200 parts"),
        (b'{"weight_map": {"": "one.safetensors", "a": "one.safetensors"}}', "its names make no tree"),
    ],
    ids=["empty", "lfs", "list", "nothing", "map a list", "number", "twice", "deep", "cut", "dots", "root"],
)
def test_a_bad_index_is_one_error_that_names_it(tmp_path: Path, index: bytes, problem: str):
    text = error_of(with_index(tmp_path / "hf", index))
    assert problem in text
    assert "model.safetensors.index.json" in text


def test_two_indexes_are_refused(tmp_path: Path):
    folder = with_index(tmp_path / "hf", GOOD_INDEX)
    (folder / "other.safetensors.index.json").write_text("{}")
    assert "several indexes are here: model.safetensors.index.json, other" in error_of(folder)


@pytest.mark.parametrize(
    ("sidecar", "problem"),
    [
        ("[", "is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("{}", "its orbaxkit metadata is malformed"),
        ('{"version": 99, "leaves": []}', "its orbaxkit metadata has version 99"),
        ('{"version": 1, "leaves": [{"path": ["a\\u0000"], "kind": "array", "tensor": "a"}]}', "is malformed"),
        ('{"version": 1, "leaves": [{"path": ["a"], "kind": "key", "tensor": "a"}]}', "is malformed"),
        ('{"version": 1, "leaves": [{"path": ["a"], "kind": "array", "tensor": "c"}]}', "the tensor 'c' is missing"),
        (json.dumps({"version": 1, "leaves": [{"path": ["a"], "kind": "array", "tensor": "a"}] * 2}), "a: comes twice"),
        (
            json.dumps({"version": 1, "leaves": [{"path": ["a"], "kind": "array", "tensor": "b", "tied": True}]}),
            "a: it is noted as tied to b, and both are here with different values",
        ),
    ],
    ids=["cut", "deep", "nothing", "version", "NUL", "key", "no tensor", "twice", "tied to nothing"],
)
def test_a_bad_sidecar_is_one_error_that_names_the_file(tmp_path: Path, sidecar: str, problem: str):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"__metadata__": {"orbaxkit": sidecar}} | TWO, DATA))
    text = error_of(path)
    assert problem in text
    assert "x.safetensors" in text or "1 leaf cannot be read" in text


@pytest.mark.parametrize("depth", [900, 2000])
def test_metadata_of_any_depth_are_copied_or_refused(tmp_path: Path, depth: int):
    settings = '{"driver": "zarr", "codec": "zstd", "custom_metadata": ' + "[" * depth + "]" * depth + "}"
    leaf = '{"path": ["a"], "kind": "array", "tensor": "a"}'
    path = tmp_path / "x.safetensors"
    sidecar = f'{{"version": 1, "settings": {settings}, "leaves": [{leaf}]}}'
    path.write_bytes(file_bytes({"__metadata__": {"orbaxkit": sidecar}} | TWO, DATA))
    if depth > 1000:
        assert "x.safetensors is nested too deeply" in error_of(path)
        return
    again = ok.convert(path, tmp_path / "y.safetensors")
    assert "[" * depth in safe_open(again, "numpy").metadata()["orbaxkit"]


# Fuzzing: whatever the bytes are, an OrbaxkitError at most, and no memory for sizes that lie: no machine has it.


def use(path: Path, out: Path | None = None) -> None:
    """Open, look, check, restore and convert."""
    with suppress(ok.OrbaxkitError):
        opened = ok.open(path)
        assert str(opened)
        opened.source.problems(opened.specs)
        ok.restore(path, as_numpy=True)
        if out is not None:
            ok.convert(path, out, overwrite=True)
            assert not ok.diff(path, out, values=True)


SIZES = st.one_of(st.integers(-2, 6), st.sampled_from([1 << 31, 1 << 47, 1 << 62, 1 << 63, 1 << 64, 10**30]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)
NAME = st.one_of(st.sampled_from(["a", "b", "a.b", "a.0", "", ".", "__metadata__", "format"]), st.text(max_size=4))
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*NAMES.values(), "F4", "F6_E2M3"]), JSON),
        "shape": st.one_of(st.lists(SIZES, max_size=4), JSON),
        "data_offsets": st.one_of(st.lists(SIZES, min_size=2, max_size=2), JSON),
    }
)


def true_to_size(sizes: list[tuple[str, str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A layout that is right: what is left to fuzz are names, shapes and metadata."""
    out, at = {}, 0
    for name, dtype, shape in sizes:
        if name not in out and name != "__metadata__":
            end = at + int(np.prod(shape)) * DTYPES[next(k for k, v in NAMES.items() if v == dtype)].itemsize
            out[name] = entry(dtype, shape, at, end)
            at = end
    return out, at


LAID_OUT = st.lists(
    st.tuples(NAME, st.sampled_from(sorted(NAMES.values())), st.lists(st.integers(0, 3), max_size=3)), max_size=4
).map(true_to_size)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=60)
@given(header=st.dictionaries(NAME, st.one_of(ENTRY, JSON), max_size=4), data=st.binary(max_size=24))
def test_no_header_gets_anything_but_an_error(scratch: Path, header: Any, data: bytes):
    path = scratch / "x.safetensors"
    path.write_bytes(file_bytes(header, data))
    use(path)


@settings(max_examples=60)
@given(data=st.data())
def test_no_changed_bytes_get_anything_but_an_error(scratch: Path, data: Any):
    header = {"__metadata__": {"format": "pt", "c": "a"}, "a": entry("F16", [1, 2], 0, 4), "b.0": entry("U8", [], 4, 5)}
    whole = bytearray(file_bytes(header, b"abcde"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    path = scratch / "y.safetensors"
    path.write_bytes(whole)
    use(path)


@settings(max_examples=30)
@given(laid_out=LAID_OUT, metadata=st.dictionaries(NAME, NAME, max_size=3))
def test_any_names_and_ties_are_read_and_written_or_refused(scratch: Path, laid_out: Any, metadata: dict[str, str]):
    tensors, size = laid_out
    path = scratch / "z.safetensors"
    path.write_bytes(file_bytes({"__metadata__": metadata} | tensors, bytes(size)))
    use(path, scratch / "out.safetensors")


SEGMENT = st.one_of(st.sampled_from(["a", "b", "0", 0, 1, ""]), SIZES, st.text(max_size=3))
LEAF = st.fixed_dictionaries(
    {"path": st.lists(SEGMENT, max_size=3), "kind": st.sampled_from(["array", "numpy", "scalar", "string", "empty"])},
    optional={
        "tensor": st.sampled_from(["a", "b", "c"]),
        "tied": st.booleans(),
        "text": st.text(max_size=5),
        "empty": st.sampled_from(["None", "Dict", "List", "Tuple", "NamedTuple", "x"]),
        "chunks": st.one_of(st.lists(SIZES, max_size=2), JSON),
        "shards": st.one_of(st.lists(SIZES, max_size=2), JSON),
        "sharding": st.one_of(
            st.fixed_dictionaries(
                {"axes": st.lists(NAME, max_size=2), "mesh": st.lists(SIZES, max_size=2), "spec": JSON}
            ),
            JSON,
        ),
    },
)
SIDECAR = st.fixed_dictionaries(
    {"version": st.one_of(st.just(1), st.just(1), JSON), "leaves": st.one_of(st.lists(LEAF, max_size=3), JSON)},
    optional={
        "containers": st.one_of(st.dictionaries(NAME, st.sampled_from(["tuple", "x.Y"]), max_size=2), JSON),
        "settings": st.one_of(
            st.fixed_dictionaries(
                {"driver": st.sampled_from(["zarr", "zarr3"]), "codec": st.sampled_from(["zstd", "raw"])},
                optional={"custom_metadata": JSON},
            ),
            JSON,
        ),
    },
)


@settings(max_examples=40)
@given(sidecar=SIDECAR)
def test_no_sidecar_gets_anything_but_an_error(scratch: Path, sidecar: Any):
    path = scratch / "s.safetensors"
    path.write_bytes(file_bytes({"__metadata__": {"orbaxkit": json.dumps(sidecar)}} | TWO, DATA))
    use(path, scratch / "item")


@settings(max_examples=40)
@given(
    index=st.one_of(
        JSON,
        st.dictionaries(NAME, st.one_of(st.sampled_from(["one.safetensors", "two.safetensors"]), JSON), max_size=4),
    ),
    noise=st.one_of(st.none(), st.tuples(st.integers(0, 60), st.binary(max_size=2))),
)
def test_no_index_gets_anything_but_an_error(scratch: Path, index: Any, noise: tuple[int, bytes] | None):
    folder = scratch / "hf"
    if not folder.exists():
        with_index(folder, GOOD_INDEX)
    data = bytearray(json.dumps({"weight_map": index}).encode())
    if noise is not None:
        data[noise[0] : noise[0] + 1] = noise[1]
    (folder / "model.safetensors.index.json").write_bytes(data)
    use(folder)
