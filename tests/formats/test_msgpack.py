"""Flax's msgpack: what Flax packs is read back, and no bytes raise anything but our own error."""

import contextlib
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from formats.golden_cases import copy_golden, read_leaf, read_tree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orbaxkit._checkpoint import open_checkpoint
from orbaxkit.errors import CheckpointError, OrbaxkitError
from orbaxkit.formats.msgpack import StoredArray, decode, read_into

DTYPES = ["float32", "int8", "bool", "uint32", "float64", "complex64", "bfloat16", "float8_e4m3fn", "float16"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def pack(tree: Any) -> bytes:
    """As flax.serialization packs."""
    return msgpack.packb(tree, default=_extension, strict_types=True, use_bin_type=True)


def _extension(value: Any) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
    array = np.asarray(value)
    packed = msgpack.packb((list(array.shape), array.dtype.name, array.tobytes()), use_bin_type=True)
    return msgpack.ExtType(3 if isinstance(value, np.generic) else 1, packed)


def decode_bytes(data: bytes) -> Any:
    return decode(io.BytesIO(data), len(data), "file")


def loaded(node: Any, data: bytes) -> Any:
    """Stored arrays as arrays."""
    if isinstance(node, dict):
        return {key: loaded(value, data) for key, value in node.items()}
    if isinstance(node, list):
        return [loaded(value, data) for value in node]
    if not isinstance(node, StoredArray):
        return node
    out = np.empty(node.shape, node.dtype)
    read_into(io.BytesIO(data), node, tuple(slice(0, size) for size in node.shape), out, "file")
    return out


def same(a: Any, b: Any) -> bool:
    """Types, structure and bits."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    data = draw(st.binary(min_size=8, max_size=8)) * 54
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    return np.frombuffer(data, np.uint8)[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.booleans() | st.none()
scalars = (
    numbers
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.complex_numbers()
    | st.builds(np.float32, st.floats(width=32))
)
trees = st.recursive(
    scalars | arrays(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=20,
)


@given(trees)
def test_what_flax_packs_is_read_back(tree):
    data = pack(tree)
    assert same(loaded(decode_bytes(data), data), tree)


def test_it_agrees_with_flax():
    serialization = pytest.importorskip("flax.serialization")
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": 1, "d": 1 + 2j, "e": np.float32(3), "f": "x", "g": None}}
    data = serialization.msgpack_serialize(tree)
    assert same(loaded(decode_bytes(data), data), serialization.msgpack_restore(data))


@given(trees, st.data())
def test_a_cut_file_is_an_error(tree, draws):
    data = pack(tree)
    end = draws.draw(st.integers(0, len(data) - 1))
    with pytest.raises(CheckpointError):
        decode_bytes(data[:end])


@given(st.binary(max_size=200))
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xc9\x00\x00\x00\x05\x01\x93\x91\xcf" + b"\xff" * 8)
@example(b"\x91" * 200)
@example(b"\xc1")
def test_any_bytes_are_a_tree_or_an_error(data):
    with contextlib.suppress(CheckpointError):
        decode_bytes(data)


@given(trees, st.data())
def test_flipped_bytes_are_a_tree_or_an_error(tree, draws):
    data = bytearray(pack(tree))
    for _ in range(3):
        data[draws.draw(st.integers(0, len(data) - 1))] ^= draws.draw(st.integers(1, 255))
    with contextlib.suppress(CheckpointError):
        loaded(decode_bytes(bytes(data)), bytes(data))


def test_a_claim_of_gigabytes_allocates_nothing():
    lies = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]
    tracemalloc.start()
    for data in lies:
        with pytest.raises(CheckpointError, match="claims"):
            decode_bytes(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("packed", "problem"),
    [
        ((([4], "float32", b"\0" * 8)), "in 8 bytes"),
        (([-1], "float32", b""), "not a list of sizes"),
        (([1 << 40, 1 << 40], "float32", b""), "in 0 bytes"),
        (([1], "object", b"\0" * 8), "unknown dtype: object"),
        (([1], "float32", 5), "that Flax does not write"),
        (([1],), "that Flax does not write"),
        (5, "that Flax does not write"),
    ],
)
def test_arrays_that_are_not_what_they_claim(packed, problem):
    data = msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(packed))})
    with pytest.raises(CheckpointError, match=problem):
        decode_bytes(data)


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"shape": {"0": 4}, "chunks": {}},
        {"shape": {"0": 4}, "chunks": {"0": 1}},
        {"shape": {"0": 5}, "chunks": {"0": np.zeros(4)}},
        {"shape": {"0": "x"}, "chunks": {"0": np.zeros(4)}},
    ],
)
def test_chunked_arrays_that_do_not_fit(node):
    with pytest.raises(CheckpointError, match="chunk"):
        decode_bytes(pack({"__msgpack_chunked_array__": True, **node}))


def test_chunks_are_joined_in_numeric_order(tmp_path):
    parts = {str(i): np.full(2, i, np.int32) for i in range(12)}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 12, "1": 2}, "chunks": dict(sorted(parts.items()))}
    (tmp_path / "checkpoint_7").write_bytes(pack({"w": chunked}))
    source = open_checkpoint(tmp_path).source
    assert read_leaf(source, "w")[:, 0].tolist() == list(range(12))
    assert read_leaf(source, "w", (slice(10, 12), slice(1, 2))).tolist() == [[10], [11]]


def test_a_file_of_one_array_and_of_one_number(tmp_path):
    (tmp_path / "checkpoint_1").write_bytes(pack({}))
    assert open_checkpoint(tmp_path / "checkpoint_1").specs[""].empty == "Dict"
    (tmp_path / "checkpoint_2").write_bytes(pack({"n": 3, "z": 2 + 1j, "f": np.float32(2), "b": True, "raw": b"ab"}))
    source = open_checkpoint(tmp_path / "checkpoint_2").source
    assert [type(source.value(name)) for name in ("n", "z", "f", "b")] == [int, complex, np.float32, bool]
    assert read_leaf(source, "raw").tolist() == [97, 98]


def test_flax_files_in_steps_beside_an_unfinished_one(tmp_path):
    for name in ("checkpoint_1", "checkpoint_10", "checkpoint_9", "checkpoint_tmp"):
        (tmp_path / name).write_bytes(pack({"w": np.ones(2)}))
    assert open_checkpoint(tmp_path).steps == (1, 9, 10)
    assert read_tree(open_checkpoint(tmp_path, step=9).source)["w"].tolist() == [1, 1]


# The same for every JSON file, and for whole items


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tree_metadata", "key_metadata", "value_metadata", "key", "shape", "a"]), inner
        )
    ),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {"key_metadata": st.lists(st.fixed_dictionaries({"key": json_values, "key_type": json_values}), max_size=3)},
    optional={"value_metadata": json_values},
)


def check_opens_or_fails(item: Path) -> None:
    with contextlib.suppress(OrbaxkitError):
        source = open_checkpoint(item).source
        source.problems(source.specs)


@pytest.mark.filterwarnings("ignore::orbaxkit.errors.CheckpointWarning")
@pytest.mark.parametrize(
    "name", ["_METADATA", "_sharding", "array_metadatas/process_0", "rep/.zarray", "_CHECKPOINT_METADATA"]
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_values, entry=entries)
def test_any_json_is_an_item_or_an_error(tmp_path_factory, name, value, entry):
    item = copy_golden("0.12.8/g_sharded_noocdbt", tmp_path_factory.mktemp("item"))
    for found in (value, {"tree_metadata": {"a": entry}}, _with(item / name, value)):
        (item / name).write_text(json.dumps(found))
        check_opens_or_fails(item)


def _with(file: Path, value: Any) -> Any:
    """The file's own document with one of its values replaced."""
    found = json.loads(file.read_text())
    key = sorted(found)[len(repr(value)) % len(found)]
    return found | {key: value}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60))
def test_any_bytes_as_a_json_file_are_an_error(tmp_path_factory, data):
    item = tmp_path_factory.mktemp("item")
    (item / "_METADATA").write_bytes(data)
    check_opens_or_fails(item)
