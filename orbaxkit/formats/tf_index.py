"""The index of a TensorFlow V2 checkpoint: what each tensor is and where its bytes lie.

Source: `tensor_bundle.proto`, `tensor_slice.proto` and `ordered_code.cc` of TensorFlow.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, check_not_lfs
from orbaxkit.formats.leveldb_table import Damaged, read_table, varint
from orbaxkit.formats.structure import MAX_DEPTH
from orbaxkit.specs import DTYPES

INDEX = ".index"
STRING = 7
TF_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn",
}  # fmt: skip

_MAX_PARTS = 4096

Extents = tuple[tuple[int, int], ...]  # start and length along each axis; -1 is all of it
Place = tuple[bytes, Extents]  # a piece: of which tensor, and which part


@dataclass(frozen=True)
class Entry:
    """One tensor, or one piece of a partitioned one: `starts` is where the piece begins."""

    dtype: int
    shape: tuple[int, ...]
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int = 0
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Index:
    """The tensors by name, each as one entry or in pieces; `broken` says what is wrong with those that have none."""

    shards: int
    entries: Mapping[str, tuple[Entry, ...]]
    broken: Mapping[str, str]


def read_index(folder: Folder, prefix: str) -> Index:
    """The index of a bundle. Raises CheckpointError: it is damaged as a whole."""
    path = folder.where(f"{prefix}{INDEX}")
    data = folder.read(f"{prefix}{INDEX}")
    check_not_lfs(data, path)
    table = read_table(data, path)
    try:
        shards = _header(table.pop(b"", None), path)
    except Damaged as error:
        raise CheckpointError(f"the TensorFlow index has a damaged header: {error}", where=path) from None
    pieces = {place: value for key, value in table.items() if key[:1] == b"\0" and (place := _slice_key(key))}
    entries: dict[str, tuple[Entry, ...]] = {}
    broken: dict[str, str] = {}
    for key, value in table.items():
        if key[:1] != b"\0":  # else a piece of a partitioned variable
            name = _name(key, path)
            try:
                entries[name] = tuple(_pieces(key, value, pieces, shards))
            except (ValueError, IndexError, struct.error) as error:
                entries[name], broken[name] = (), str(error)
    return Index(shards, entries, broken)


def _name(key: bytes, path: str) -> str:
    try:
        name = key.decode()
    except UnicodeDecodeError:
        name = ""
    if not name or "\0" in name or name.count("/") >= MAX_DEPTH:
        raise CheckpointError(f"the TensorFlow index has a name that none can be: {key[:80]!r}", where=path)
    return name


def _header(value: bytes | None, path: str) -> int:
    """How many shards there are."""
    if value is None:
        raise CheckpointError("the index has no header: this is no TensorFlow checkpoint", where=path)
    fields = dict(_fields(value))
    shards = fields.get(1, 1)
    if fields.get(2, 0) != 0:
        raise CheckpointError("the checkpoint was written big-endian, which is not supported", where=path)
    if not isinstance(shards, int) or not 1 <= shards < 100_000:
        raise CheckpointError(f"the index says {shards!r} shards", where=path)
    return shards


def _pieces(key: bytes, value: bytes, pieces: Mapping[Place, bytes], shards: int) -> Iterator[Entry]:
    """The entry itself, or the entries of the slices that it is made of."""
    whole, slices = _entry(value, shards)
    if not slices:
        yield whole
        return
    if whole.dtype == STRING:
        raise Damaged("it holds strings in parts, which are not supported")
    covered = 0
    places = []
    for extents in slices:
        starts, shape = _placed(extents, whole.shape)
        found = pieces.get((key, extents))
        if found is None:
            raise Damaged(f"its part {list(zip(starts, shape, strict=True))} is not in the index")
        part, inner = _entry(found, shards)
        if inner or part.shape != shape or part.dtype != whole.dtype:
            raise Damaged("a part of it has another shape or dtype than the whole says")
        covered += math.prod(shape)
        if 0 not in shape:
            places.append((starts, shape))
        yield Entry(part.dtype, shape, part.shard, part.offset, part.size, part.crc, starts)
    if covered != math.prod(whole.shape):
        raise Damaged(f"its parts hold {covered:,} of {math.prod(whole.shape):,} values")
    _check_apart(places)


def _check_apart(places: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Parts that hold as many values as the whole fill it if no two of them overlap."""
    if len(places) > _MAX_PARTS:
        raise Damaged(f"it is in {len(places):,} parts, more than any writer makes")
    starts = np.array([start for start, _ in places], np.int64)
    stops = starts + np.array([shape for _, shape in places], np.int64)
    for i in range(1, len(places)):
        if ((starts[:i] < stops[i]) & (stops[:i] > starts[i])).all(axis=1).any():
            raise Damaged("its parts overlap")


def _placed(extents: Extents, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(extents) != len(shape):
        raise Damaged("a part of it has another number of axes")
    starts = tuple([max(start, 0) if length >= 0 else 0 for start, length in extents])
    sizes = tuple([length if length >= 0 else size for (_, length), size in zip(extents, shape, strict=True)])
    if any(start + size > whole for start, size, whole in zip(starts, sizes, shape, strict=True)):
        raise Damaged("a part of it lies outside the whole")
    return starts, sizes


def _entry(value: bytes, shards: int) -> tuple[Entry, list[Extents]]:
    dtype = shard = offset = size = crc = 0
    shape: tuple[int, ...] = ()
    slices: list[Extents] = []
    for number, found in _fields(value):
        match number, found:
            case 1, int():
                dtype = found
            case 2, bytes():
                shape = _shape(found)
            case 3, int():
                shard = found
            case 4, int():
                offset = found
            case 5, int():
                size = found
            case 6, int():
                crc = found
            case 7, bytes():
                slices.append(tuple([_extent(extent) for number, extent in _fields(found) if number == 1]))
    if dtype not in TF_DTYPES and dtype != STRING:
        raise Damaged(f"its dtype {dtype} is none that is known here")
    if not slices and shard >= shards:
        raise Damaged(f"it lies in shard {shard} of {shards}")
    entry = Entry(dtype, shape, shard, offset, size, crc)
    if not slices and dtype != STRING and math.prod(shape) * DTYPES[TF_DTYPES[dtype]].itemsize != size:
        raise Damaged(f"{TF_DTYPES[dtype]}{list(shape)} does not take {size:,} bytes")
    if not slices and dtype == STRING and math.prod(shape) > max(size, 1):
        raise Damaged(f"{math.prod(shape):,} strings do not fit into {size:,} bytes")
    return entry, slices


def _shape(data: bytes) -> tuple[int, ...]:
    sizes = []
    for number, dimension in _fields(data):
        if number == 2:
            size = dict(_fields(_message(dimension))).get(1, 0)
            if not isinstance(size, int) or size >= 1 << 63:
                raise Damaged("a size in its shape is negative")
            sizes.append(size)
        elif number == 3:
            raise Damaged("its shape is not known")
    if len(sizes) > 32 or math.prod(size or 1 for size in sizes) >= 1 << 58:  # numpy counts bytes in 63 bits
        raise Damaged(f"its shape {sizes[:8]} is none that an array can have")
    return tuple(sizes)


def _extent(data: int | bytes) -> tuple[int, int]:
    fields = dict(_fields(_message(data)))
    start, length = fields.get(1, 0), fields.get(2, -1)
    if not isinstance(start, int) or not isinstance(length, int):
        raise Damaged("a part of it has no sensible place")
    return start, length


def _message(data: int | bytes) -> bytes:
    if isinstance(data, bytes):
        return data
    raise Damaged("a number stands where a message should")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers, and bytes."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(data[at : at + width], "little")
            at += width
        elif kind == 2:
            length, at = varint(data, at)
            value = data[at : at + length]
            at += length
        else:
            raise Damaged("its entry is no protobuf message")
        if at > len(data):
            raise Damaged("its entry is cut short")
        yield tag >> 3, value


def _slice_key(key: bytes) -> Place | None:
    """The name and the extents in the key of a piece, in TensorFlow's ordered code; None where it is none."""
    try:
        name, at = _ordered_string(key, 1)  # after the number 0
        count, at = _ordered_number(key, at)
        values = []
        for _ in range(2 * count):
            value, at = _ordered_signed(key, at)
            values.append(value)
    except IndexError:
        return None
    return name, tuple(zip(values[0::2], values[1::2], strict=True))


def _ordered_string(data: bytes, at: int) -> tuple[bytes, int]:
    out = bytearray()
    while True:
        byte, following = data[at], data[at + 1] if data[at] in (0, 0xFF) else None
        if byte == 0 and following == 1:
            return bytes(out), at + 2
        out.append(byte)
        at += 1 if following is None else 2


def _ordered_number(data: bytes, at: int) -> tuple[int, int]:
    length = data[at]
    return int.from_bytes(data[at + 1 : at + 1 + length], "big"), at + 1 + length


def _ordered_signed(data: bytes, at: int) -> tuple[int, int]:
    """As many leading bits of the sign as there are bytes, then the value."""
    is_negative = data[at] < 0x80
    bits = "".join(f"{byte:08b}" for byte in data[at : at + 10])
    sign = "0" if is_negative else "1"
    length = len(bits) - len(bits.lstrip(sign))
    digits = bits[length + (length < 8 * len(bits)) : 8 * length]
    value = int(digits or "0", 2)
    return (value - (1 << len(digits)) if is_negative else value), at + length
