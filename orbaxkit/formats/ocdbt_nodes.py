"""Nodes of an OCDBT tree, decoded by columns: the tree of a large checkpoint has millions of keys.

The format is TensorStore's, as its page on the `ocdbt` key-value store describes it; `ocdbt_writer` is the other way. A
key lacks what it shares with the key before it. Whoever walks the tree gives a node the keys' common prefix.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np

MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
NODE_MAGIC = bytes.fromhex("0cdb20de")

_MAX_BYTES = 1 << 30  # of a node, decoded; TensorStore writes nodes of 100 MB at most
_MAX_ENTRIES = 1 << 20  # as TensorStore refuses more
_MAX_FILES = 1 << 20
_NOWHERE = 2**64 - 1


class Damaged(ValueError):
    """The bytes are no node."""


class DataFile(NamedTuple):
    """A data file; below a node that lies in it, names are relative to its `base`."""

    base: str
    name: str


class Location(NamedTuple):
    """Where a node or a value lies."""

    file: DataFile
    offset: int
    length: int


class Child(NamedTuple):
    """A node as its parent names it; `prefix` is what all keys below share."""

    location: Location
    prefix: bytes


@dataclass(frozen=True)
class Leaf:
    """A leaf node's entries, in the order of their keys; columns of the file are only those that lie in one."""

    files: list[DataFile]
    shared: np.ndarray  # how many bytes each key has in common with the key before
    tail_ends: np.ndarray  # where the rest of each key ends in `tails`
    tails: bytes
    lengths: np.ndarray
    outside: np.ndarray  # how many of the values before each one lie in files
    inline_starts: np.ndarray  # where each value that does not lie in a file begins in `inline`
    inline: bytes
    file_ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def tail(self, row: int) -> bytes:
        """What a key adds to the key before."""
        return self.tails[self.tail_ends[row - 1] if row else 0 : self.tail_ends[row]]

    def keys(self, start: int, stop: int, before: bytes) -> Iterator[bytes]:
        """The keys of rows; `before` is the key before them, or one that shares as much."""
        key = before
        ends = self.tail_ends[start:stop].tolist()
        begin = int(self.tail_ends[start - 1]) if start else 0
        for shared, end in zip(self.shared[start:stop].tolist(), ends, strict=True):
            key = key[:shared] + self.tails[begin:end]
            begin = end
            yield key

    def keys_at(self, rows: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """The keys of some rows, without making those between: only rows where keys share least matter."""
        key, at = b"", -1
        for row in rows:
            while at < row:
                between = self.shared[at + 1 : row + 1]
                at = row - int(np.argmin(between[::-1]))
                key = key[: self.shared[at]] + self.tail(at)
            yield row, key

    def rows_ending_in(self, ends: Iterable[bytes]) -> list[int]:
        """Rows whose keys may end so, by the last byte, which only the first may have in the common prefix."""
        last = np.frombuffer(self.tails, np.uint8)[self.tail_ends[1:] - np.uint32(1)]
        return [0, *(np.flatnonzero(np.isin(last, [end[-1] for end in ends])) + 1).tolist()]

    def value(self, row: int) -> bytes | Location:
        """A value, or where it lies."""
        place, length = int(self.outside[row]), int(self.lengths[row])
        if self.outside[row + 1] > place:
            return Location(self.files[self.file_ids[place]], int(self.offsets[place]), length)
        start = int(self.inline_starts[row])
        return self.inline[start : start + length]


def read_manifest(data: bytes) -> tuple[Location, int] | None:
    """The root of the newest version and its height; None for an empty store."""
    body = _Body(_unpack(data, MANIFEST_MAGIC))
    body.take(16)  # which store this is
    if body.number() != 0:
        raise Damaged("its versions lie in numbered manifests")
    body.number(), body.number(), body.take(1)  # limits of nodes, and of the tree of versions
    if body.number():
        body.take(4)  # zstd's level
    files = _files(body, "")
    count = body.count(_MAX_ENTRIES)
    if not count:
        raise Damaged("it names no version")
    body.numbers(count)
    heights = body.take(count)
    file, offset, length = (int(body.numbers(count)[-1]) for _ in range(3))
    return None if offset == length == _NOWHERE else (_location(files, file, offset, length), heights[-1])


def read_node(data: bytes, base: str) -> tuple[int, list[Child] | Leaf]:
    """A node's height, and its children or entries; data files are relative to `base`."""
    body = _Body(_unpack(data, NODE_MAGIC))
    height = body.take(1)[0]
    files = _files(body, base)
    count = body.count(_MAX_ENTRIES)
    if not count:
        raise Damaged("a node is empty")
    shared = np.concatenate([np.zeros(1, np.uint64), body.numbers(count - 1)])
    sizes = body.numbers(count)
    if height:
        return height, _children(body, files, shared, sizes)
    return height, _leaf(body, files, shared, sizes)


def _children(body: "_Body", files: list[DataFile], shared: np.ndarray, sizes: np.ndarray) -> list[Child]:
    prefixes = body.numbers(len(sizes)).tolist()
    keys = _texts(body, shared, sizes)
    places = [body.numbers(len(sizes)).tolist() for _ in range(3)]
    locations = [_location(files, *place) for place in zip(*places, strict=True)]
    return [Child(location, key[:size]) for location, key, size in zip(locations, keys, prefixes, strict=True)]


def _leaf(body: "_Body", files: list[DataFile], shared: np.ndarray, sizes: np.ndarray) -> Leaf:
    ends = _ends(sizes)
    _check_shared(shared, sizes)
    if not sizes[1:].all():
        raise Damaged("a key comes twice")
    tails = body.take(int(ends[-1]))
    lengths = body.numbers(len(sizes))
    kinds = np.frombuffer(body.take(len(sizes)), np.uint8)
    if (kinds > 1).any():
        raise Damaged("a value is of an unknown kind")
    inline_ends = _ends(np.where(kinds, np.uint64(0), lengths))
    outside = np.concatenate([np.zeros(1, np.uint32), kinds.cumsum(dtype=np.uint32)])
    file_ids, offsets = body.numbers(int(outside[-1])), body.numbers(int(outside[-1]))
    if len(file_ids) and int(file_ids.max()) >= len(files):
        raise Damaged("a value lies in an unknown file")
    if (lengths >> np.uint64(62)).any() or (offsets >> np.uint64(62)).any():
        raise Damaged("a value lies beyond any file's end")
    return Leaf(
        files=files,
        shared=shared.astype(np.uint16),
        tail_ends=ends,
        tails=tails,
        lengths=lengths.astype(np.int64),
        outside=outside,
        inline_starts=np.concatenate([np.zeros(1, np.uint32), inline_ends[:-1]]),
        inline=body.take(int(inline_ends[-1])),
        file_ids=file_ids.astype(np.uint32),
        offsets=offsets.astype(np.int64),
    )


def _ends(sizes: np.ndarray) -> np.ndarray:
    """Where pieces of these sizes end."""
    if len(sizes) and int(sizes.max()) > _MAX_BYTES:
        raise Damaged("it is cut short")
    ends = sizes.cumsum(dtype=np.uint64)
    if len(ends) and int(ends[-1]) > _MAX_BYTES:
        raise Damaged("it is cut short")
    return ends.astype(np.uint32)


def _check_shared(shared: np.ndarray, sizes: np.ndarray) -> None:
    """A key shares no more with the key before than that has."""
    if int(shared.max()) > 0xFFFF or int(sizes.max()) > 0xFFFF:
        raise Damaged("a key is too long")
    if (shared[1:] > (shared + sizes)[:-1]).any():
        raise Damaged("a key shares more than the key before has")


def _texts(body: "_Body", shared: np.ndarray, sizes: np.ndarray) -> list[bytes]:
    _check_shared(shared, sizes)
    ends = _ends(sizes).tolist()
    tails = body.take(ends[-1])
    out: list[bytes] = []
    text = b""
    for skip, start, end in zip(shared.tolist(), [0, *ends], ends, strict=False):
        text = text[:skip] + tails[start:end]
        out.append(text)
    return out


def _files(body: "_Body", base: str) -> list[DataFile]:
    count = body.count(_MAX_FILES)
    if not count:
        return []
    shared = np.concatenate([np.zeros(1, np.uint64), body.numbers(count - 1)])
    sizes, bases = body.numbers(count), body.numbers(count).tolist()
    names = [base + name.decode("utf-8", "surrogateescape") for name in _texts(body, shared, sizes)]
    return [DataFile(name[: len(base) + size], name) for name, size in zip(names, bases, strict=True)]


def _location(files: list[DataFile], file: int, offset: int, length: int) -> Location:
    if file >= len(files):
        raise Damaged("a node lies in an unknown file")
    if length > _MAX_BYTES:
        raise Damaged(f"a node has {length:,} bytes")
    return Location(files[file], offset, length)


def _unpack(data: bytes, magic: bytes) -> bytes:
    """The body of a manifest or a node, its checksum checked."""
    if data[:4] != magic:
        raise Damaged(f"what should be a node starts with {data[:4].hex(' ')}")
    if len(data) < 18 or int.from_bytes(data[4:12], "little") != len(data):
        raise Damaged(f"a node of {int.from_bytes(data[4:12], 'little'):,} bytes has {len(data):,}")
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise Damaged("a checksum is wrong (CRC-32C)")
    if data[12] != 0 or data[13] > 1:
        raise Damaged("it is of an unknown version or compression")
    return _decompress(data[14:-4]) if data[13] else data[14:-4]


def _decompress(data: bytes) -> bytes:
    import zstandard

    out = bytearray()
    try:
        for block in zstandard.ZstdDecompressor().read_to_iter(io.BytesIO(data), write_size=1 << 20):
            out += block
            if len(out) > _MAX_BYTES:
                raise Damaged(f"a node has more than {_MAX_BYTES:,} bytes")
    except zstandard.ZstdError as error:
        raise Damaged(f"zstd: {error}") from None
    return bytes(out)


class _Body:
    """The bytes of a node, read from their beginning."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.array = np.frombuffer(data, np.uint8)
        self.at = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self.at += size
        if self.at > len(self.data):
            raise Damaged("it is cut short")
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        """The next varint."""
        return int(self.numbers(1)[0])

    def count(self, most: int) -> int:
        """The next varint, how many of something follow."""
        count = self.number()
        if count > most or count > len(self.data):
            raise Damaged(f"it has {count:,} entries")
        return count

    def numbers(self, count: int) -> np.ndarray:
        """The next so many varints."""
        start, ends, missing = self.at, [], count
        while missing:  # each number has one byte at least, so this many never reach beyond them
            block = np.frombuffer(self.take(missing), np.uint8)
            found = np.flatnonzero(block < 128)
            ends.append(found + (self.at - missing - start))
            missing -= len(found)
        return _varints(self.array[start : self.at], np.concatenate(ends) if ends else np.zeros(0, np.int64))


def _varints(data: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Seven bits a byte, lowest first; the last byte of each number is below 128."""
    if len(data) == len(ends):
        return data.astype(np.uint64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    widths = ends - starts + 1
    if widths.max() > 10:
        raise Damaged("a number is too long")
    out = (data[starts] & 127).astype(np.uint64)
    for i in range(1, int(widths.max())):
        longer = np.flatnonzero(widths > i)
        out[longer] |= (data[starts[longer] + i] & 127).astype(np.uint64) << np.uint64(7 * i)
    return out
