"""More that TensorFlow 2.21 itself wrote: shards, uneven parts, an object-based and a V1 checkpoint; hostile indexes.

`worlds/tf_written/write.py` wrote them; `variables.json` holds the hashes of the arrays before they were saved.
"""

import hashlib
import json
import resource
import shutil
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit.formats.snappy import decompress

GOLDEN = Path(__file__).parent.parent / "worlds/tf_written"
PREFIXES = {"adam": "model.ckpt-20", "sharded": "model.ckpt-7", "partitioned": "model.ckpt", "object": "obj-1"}
MAGIC = 0xDB4775248B80FB57


def whole(source: Any, name: str) -> np.ndarray:
    spec = source.specs[name]
    out = np.empty(spec.shape, spec.dtype)
    source.read(name, tuple(slice(0, size) for size in spec.shape), out).result()
    return out


def told(case: str) -> dict[str, dict[str, Any]]:
    return json.loads((GOLDEN / case / "variables.json").read_text())


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / case, to / case)) / PREFIXES[case]


@pytest.mark.parametrize("case", PREFIXES)
def test_names_shapes_and_bytes_are_those_that_were_saved(case):
    source = ok.open(GOLDEN / case / PREFIXES[case]).source
    expected = told(case)
    names = {"/".join(map(str, path)): name for name, path in source.specs.paths.items()}
    assert set(names) == set(expected)
    assert source.problems(source.specs) == []
    for variable, leaf in expected.items():
        name = names[variable]
        assert list(source.specs[name].shape) == leaf["shape"]
        if "hex" in leaf:
            assert source.value(name).encode().hex() == leaf["hex"][0]
        else:
            assert str(source.specs[name].dtype) == leaf["dtype"]
            assert hashlib.sha256(whole(source, name).tobytes()).hexdigest() == leaf["sha256"]


@given(st.data())
@settings(max_examples=60)
def test_regions_across_uneven_parts(data):
    source = ok.open(GOLDEN / "partitioned/model.ckpt").source
    name = data.draw(st.sampled_from(["rows", "columns", "long"]))
    array = whole(source, name)
    spans = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in array.shape]
    index = tuple(slice(*span) for span in spans)
    out = np.empty(array[index].shape, array.dtype)
    source.read(name, index, out).result()
    np.testing.assert_array_equal(out, array[index])


def test_object_based_names_are_kept_whole(tmp_path):
    path = ok.convert(GOLDEN / "object/obj-1", tmp_path / "orbax")
    assert "layer/kernel/.ATTRIBUTES/VARIABLE_VALUE" in ok.open(path).specs
    assert not ok.diff(GOLDEN / "object/obj-1", path, values=True)


def test_a_missing_shard_costs_only_its_tensors(tmp_path):
    prefix = copied("sharded", tmp_path)
    Path(f"{prefix}.data-00001-of-00003").unlink()
    source = ok.open(prefix).source
    lost = {name for name, _ in source.problems(source.specs)}
    assert 0 < len(lost) < len(source.specs)
    for name in source.specs:
        if name not in lost:
            assert hashlib.sha256(whole(source, name).tobytes()).hexdigest() == told("sharded")[name]["sha256"]
            continue
        with pytest.raises(ok.CheckpointError, match="data-00001-of-00003 is missing") as error:
            whole(source, name)
        assert [leaf for leaf, _ in error.value.leaves] == [name]


def test_a_part_that_is_damaged_costs_the_regions_that_touch_it(tmp_path):
    prefix = copied("partitioned", tmp_path)
    shard = Path(f"{prefix}.data-00000-of-00001")
    whole_rows = whole(ok.open(prefix).source, "rows")
    at = shard.read_bytes().index(whole_rows[80].tobytes())  # in the last part
    raw = bytearray(shard.read_bytes())
    raw[at] ^= 1
    shard.write_bytes(raw)
    source = ok.open(prefix).source
    out = np.empty((70, 8), np.float32)
    source.read("rows", (slice(0, 70), slice(0, 8)), out).result()
    np.testing.assert_array_equal(out, whole_rows[:70])
    with pytest.raises(ok.CheckpointError, match=r"rows: .*data-00000-of-00001.*CRC"):
        whole(source, "rows")


def test_slots_are_keys_beside_their_variables():
    paths = ok.open(GOLDEN / "adam/model.ckpt-20").specs.paths.values()
    assert ("bert", "pooler", "dense", "kernel") in paths
    assert ("bert", "pooler", "dense", "kernel/adam_m") in paths


def test_a_v1_file_is_called_so():
    with pytest.raises(ok.CheckpointError, match=r"old\.ckpt is a TensorFlow checkpoint in the old V1 format"):
        ok.open(GOLDEN / "v1/old.ckpt")


@pytest.mark.parametrize("case", ["sharded", "partitioned"])
def test_every_flipped_byte_is_told_or_harmless(case, tmp_path):
    """The index byte by byte: it opens nothing, or holds the same."""
    prefix = copied(case, tmp_path)
    index = Path(f"{prefix}.index")
    good = index.read_bytes()
    for at in range(len(good)):
        index.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            source = ok.open(prefix).source
            digests = {name: hashlib.sha256(whole(source, name).tobytes()).hexdigest() for name in source.specs}
        except ok.CheckpointError:
            continue
        assert digests == {name: leaf["sha256"] for name, leaf in told(case).items()}


def test_an_index_cut_anywhere_opens_nothing(tmp_path):
    prefix = copied("partitioned", tmp_path)
    index = Path(f"{prefix}.index")
    good = index.read_bytes()
    for size in range(len(good)):
        index.write_bytes(good[:size])
        with pytest.raises(ok.CheckpointError, match="index"):
            ok.open(prefix).specs  # noqa: B018


# Indexes by hand. The CRC is computed bit by bit here, apart from the library that the reader uses.


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            out += varint(number << 3) + varint(value)
    return out


def shape(*sizes: int) -> bytes:
    return message(*[(2, message((1, size))) for size in sizes])


def extents(*pairs: tuple[int, int]) -> bytes:
    return message(*[(1, message((1, start), (2, length))) for start, length in pairs])


def block(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in pairs)
    return body + struct.pack("<II", 0, 1)


def table(*blocks: bytes, kind: int = 0, order: Iterable[int] | None = None) -> bytes:
    """A table of these data blocks, whose index block names them in an order."""
    out, handles = b"", []
    for body in blocks:
        handles.append(varint(len(out)) + varint(len(body)))
        out += body + bytes([kind]) + masked(body + bytes([kind]))
    named = [handles[i] for i in (range(len(blocks)) if order is None else order)]
    index = block((i.to_bytes(4, "big"), handle) for i, handle in enumerate(named))
    footer = varint(0) * 2 + varint(len(out)) + varint(len(index))
    return out + index + b"\0" + masked(index + b"\0") + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def bundle(folder: Path, index: bytes, data: bytes = b"") -> Path:
    (folder / "x.index").write_bytes(index)
    (folder / "x.data-00000-of-00001").write_bytes(data)
    return folder / "x"


HEADER = (b"", message((1, 1)))
VALUES = np.arange(6, dtype=np.float32)


def entry(array: np.ndarray, offset: int = 0, dtype: int = 1) -> bytes:
    data = array.tobytes()
    numbers = message((1, dtype), (2, shape(*array.shape)), (4, offset), (5, len(data)))
    return numbers + varint(6 << 3 | 5) + masked(data)


def refusal(path: Path) -> str:
    with pytest.raises(ok.CheckpointError) as error:
        ok.restore(path, as_numpy=True)
    assert error.value.__cause__ is None
    assert len(str(error.value)) < 1000
    return str(error.value)


def test_many_blocks_are_all_read(tmp_path):
    names = [b"v%04d" % i for i in range(300)]
    blocks = [block([HEADER])] + [block([(n, entry(VALUES)) for n in names[i : i + 7]]) for i in range(0, 300, 7)]
    found = ok.restore(bundle(tmp_path, table(*blocks), VALUES.tobytes()), as_numpy=True)
    assert list(found) == [name.decode() for name in names]
    np.testing.assert_array_equal(found["v0299"], VALUES)


def test_parts_that_overlap_would_leave_values_unread(tmp_path):
    part = np.arange(3, dtype=np.float32)
    key = b"\0w\0\x01\x01\x01" + bytes([0x80, 0x83])
    full = message((1, 1), (2, shape(6)), (7, extents((0, 3))), (7, extents((0, 3))))
    path = bundle(tmp_path, table(block([HEADER, (key, entry(part)), (b"w", full)])), part.tobytes())
    assert "w: its parts overlap" in refusal(path)


def test_parts_under_binary_keys_are_no_leaves(tmp_path):
    left, right = VALUES[:2], VALUES[2:]
    keys = [b"\0w\0\x01\x01\x01" + bytes([0x80 + start, 0x80 + size]) for start, size in ((0, 2), (2, 4))]
    full = message((1, 1), (2, shape(6)), (7, extents((0, 2))), (7, extents((2, 4))))
    pairs = [HEADER, (keys[0], entry(left)), (keys[1], entry(right, 8)), (b"w", full)]
    found = ok.restore(bundle(tmp_path, table(block(pairs)), VALUES.tobytes()), as_numpy=True)
    np.testing.assert_array_equal(found["w"], VALUES)
    assert list(found) == ["w"]


def test_strings_in_parts_are_refused_by_name(tmp_path):
    full = message((1, 7), (2, shape(6)), (7, extents((0, 6))))
    assert "w: it holds strings in parts" in refusal(bundle(tmp_path, table(block([HEADER, (b"w", full)]))))


def test_one_block_named_many_times_is_read_once(tmp_path):
    index = table(block([HEADER, (b"w", entry(VALUES))]), order=[0] * 100_000)
    began = time.monotonic()
    assert "not in order" in refusal(bundle(tmp_path, index, VALUES.tobytes()))
    assert time.monotonic() - began < 20


def test_blocks_without_entries_are_refused(tmp_path):
    index = table(block([HEADER]), struct.pack("<II", 0, 1), order=[0, *[1] * 1000])
    assert "a block holds no entry" in refusal(bundle(tmp_path, index))


def test_keys_that_grow_from_each_other_take_no_memory(tmp_path):
    """Thirty thousand entries of five bytes, each key one longer than the last: 450 MB of keys."""
    value = b""
    body = bytes([0, 0, len(HEADER[1])]) + HEADER[1]
    body += b"".join(varint(i) + b"\x01\0a" + value for i in range(30_000)) + struct.pack("<II", 0, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "far more bytes than the file has" in refusal(bundle(tmp_path, table(body)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "name", [b"a\0b", b"\xff\xfe", b"/".join([b"x"] * 5000)], ids=["NUL", "not-utf8", "five-thousand-deep"]
)
def test_names_that_none_can_be(tmp_path, name):
    index = table(block([HEADER, (name, entry(VALUES))]))
    assert "a name that none can be" in refusal(bundle(tmp_path, index, VALUES.tobytes()))


@pytest.mark.parametrize("header", [b"\x07", b"\x80", message((1, 1 << 40)), message((1, 0))])
def test_damaged_headers(tmp_path, header):
    assert "index" in refusal(bundle(tmp_path, table(block([(b"", header), (b"w", entry(VALUES))]))))


def test_big_endian_bundles_are_refused(tmp_path):
    assert "big-endian" in refusal(bundle(tmp_path, table(block([(b"", message((1, 1), (2, 1)))]))))


def test_a_size_of_zero_hides_no_impossible_shape(tmp_path):
    bad = message((1, 1), (2, shape(0, 1 << 62, 1 << 62)))
    path = bundle(tmp_path, table(block([HEADER, (b"bad", bad), (b"w", entry(VALUES))])), VALUES.tobytes())
    assert "bad: its shape" in refusal(path)
    np.testing.assert_array_equal(ok.restore(path, ok.drop("bad"), as_numpy=True)["w"], VALUES)


def test_a_snappy_bomb_is_refused_at_once(tmp_path):
    def repeated(size: int) -> bytes:
        return varint(size) + b"\0a" + b"\xfe\x01\0" * 200_000  # copies of 64 bytes, one back

    began = time.monotonic()
    for body in (repeated(1 << 34), repeated(1 << 20), repeated(60 << 20)):
        assert "snappy" in refusal(bundle(tmp_path, table(body[:3000], kind=1)))
        with pytest.raises(ValueError, match="snappy"):
            decompress(body)
    assert time.monotonic() - began < 20


@given(st.lists(st.tuples(st.sampled_from([1, 4, 64]), st.integers(1, 300)), max_size=20), st.binary(min_size=1))
def test_snappy_copies_repeat_what_is_there(copies, start):
    """Literals and two-byte copies, against the definition: byte by byte."""
    plain = bytearray(start[:60])
    data = bytes([(len(plain) - 1) << 2]) + plain
    for length, back in copies:
        offset = min(back, len(plain))
        data += bytes([(length - 1) << 2 | 2]) + struct.pack("<H", offset)
        for _ in range(length):
            plain.append(plain[-offset])
    assert decompress(varint(len(plain)) + data) == plain


def test_the_list_beside_them_says_which_is_the_latest_by_name_only(tmp_path):
    for case in ("partitioned", "object"):
        for file in (GOLDEN / case).glob("*.*-of-*"):
            shutil.copy(file, tmp_path)
        shutil.copy(next((GOLDEN / case).glob("*.index")), tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/gone/long ago/model.ckpt"\n')
    assert "rows" in ok.open(tmp_path).specs
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "../../elsewhere"\n')
    with pytest.raises(ok.CheckpointError, match="several TensorFlow checkpoints") as error:
        ok.open(tmp_path)
    assert [name for name, _ in error.value.leaves] == ["model.ckpt", "obj-1"]


@pytest.mark.parametrize("end", ["", ".index", ".data-00000-of-00001"])
def test_any_file_beside_the_list_opens_its_bundle(tmp_path, end):
    prefix = copied("partitioned", tmp_path)
    (prefix.parent / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')
    assert len(ok.open(f"{prefix}{end}").specs) == 4


def test_what_lacks_its_index_or_is_of_v1_is_told_beside_the_list_too(tmp_path):
    prefix = copied("partitioned", tmp_path)
    shutil.copy(GOLDEN / "v1/old.ckpt", prefix.parent)
    (prefix.parent / "checkpoint").write_text('model_checkpoint_path: "old.ckpt"\n')
    with pytest.raises(ok.CheckpointError, match="old V1 format"):
        ok.open(prefix.parent / "old.ckpt")
    Path(f"{prefix}.index").unlink()
    with pytest.raises(ok.CheckpointError, match=r"the TensorFlow index model\.ckpt\.index is missing"):
        ok.open(f"{prefix}.data-00000-of-00001")
