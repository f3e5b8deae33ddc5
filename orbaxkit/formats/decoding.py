"""The fast lane: stored values of local files decoded straight into the caller's buffer, nothing in between.

It reads what Orbax writes by default: C order, little-endian, zstd or no compression, zarr 3 shards too. Anything else,
and regions with missing values, go through TensorStore (`arrays`); both give the same bits.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Pending, part_of
from orbaxkit.formats.files import pread
from orbaxkit.formats.ocdbt import UNKNOWN, Value
from orbaxkit.formats.stores import ArrayStore
from orbaxkit.formats.zarr import ZarrArray

# Two threads keep two cores busy; more only compete for memory bandwidth. Those that wait for a store do not.
_THREADS = min(4, os.cpu_count() or 1)
_REMOTE_THREADS = 16
_READ_BYTES = 256 << 10
_NO_CHUNK = 2**64 - 1

Position = tuple[int, ...]


class _Hole(Exception):
    """A shard lacks a chunk that stands for the fill value, which TensorStore knows."""


@dataclass(frozen=True)
class Decoder:
    """Reads regions of one store's arrays on a few threads."""

    store: ArrayStore

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        count = _THREADS if self.store.folder.is_local else _REMOTE_THREADS
        return ThreadPoolExecutor(count, thread_name_prefix="orbaxkit-decode")

    def read(
        self,
        leaf: str,
        name: str,
        array: ZarrArray,
        index: tuple[slice, ...],
        out: np.ndarray,
        otherwise: Callable[[], Pending] | None = None,
    ) -> Pending | None:
        """Start reading a region into `out`; None where the fast lane cannot read it.

        `otherwise` reads it where a shard lacks a chunk that stands for the fill value; without it, that is damage.
        """
        if array.codec is None:
            return None
        values = self.store.values(name)
        wanted = [(position, values.get(array.key(position))) for position in _touched(array.value_shape, index)]
        if any(value is None for _, value in wanted):
            return None
        may_lack = otherwise is not None
        jobs = [_Job(self.store, leaf, array, at, value, index, out, may_lack) for at, value in wanted if value]
        return _Started(tuple(self._pool.submit(job.run) for job in jobs), otherwise)


@dataclass(frozen=True)
class _Started:
    futures: tuple[Future, ...]
    otherwise: Callable[[], Pending] | None

    def result(self) -> None:
        """Wait for every value."""
        try:
            for future in self.futures:
                future.result()
        except _Hole:
            wait(self.futures)
            assert self.otherwise is not None
            self.otherwise().result()


@dataclass(frozen=True)
class _Job:
    """One stored value, and the region of the leaf that is wanted in `out`."""

    store: ArrayStore
    leaf: str
    array: ZarrArray
    position: Position
    value: Value
    index: tuple[slice, ...]
    out: np.ndarray
    may_lack: bool

    def run(self) -> None:
        """Decode what of the value is wanted."""
        try:
            with self.store.open(self.value) as file:
                self._read(_extent(file, self.value))
        except (Undecodable, EOFError, MemoryError) as error:
            key = self.array.key(self.position)
            problem = f"chunk {key}{f' in {self.value.file}' if self.value.file else ''}: {error}"
            raise CheckpointError(
                "a leaf cannot be read", leaves=[(self.leaf, problem)], where=self.store.where("")
            ) from None

    def _read(self, extent: "_Extent") -> None:
        if self.array.shard_shape is None:
            self._decode(extent, self.position)
            return
        per_shard = tuple(s // c for s, c in zip(self.array.shard_shape, self.array.chunk_shape, strict=True))
        entries = _shard_index(extent, per_shard)
        inside = [range(p * n, (p + 1) * n) for p, n in zip(self.position, per_shard, strict=True)]
        for chunk in _touched(self.array.chunk_shape, self.index):
            if all(at in span for at, span in zip(chunk, inside, strict=True)):
                offset, length = entries[
                    tuple(at - span.start for at, span in zip(chunk, inside, strict=True))
                ].tolist()
                if offset == _NO_CHUNK:
                    raise _Hole if self.may_lack else Undecodable("it is missing in its shard")
                self._decode(extent.part(offset, length), chunk)

    def _decode(self, extent: "_Extent", chunk: Position) -> None:
        """Decode a chunk into its place where it fits there whole and in order, else by way of a buffer."""
        sizes = self.array.chunk_shape
        bounds = [(at * size, (at + 1) * size) for at, size in zip(chunk, sizes, strict=True)]
        common = [(max(a, s.start), min(b, s.stop)) for (a, b), s in zip(bounds, self.index, strict=True)]
        place = part_of(self.out, _moved(common, [s.start for s in self.index]))
        if place.shape == sizes and place.flags.c_contiguous:
            _fill(place, extent, self.array.codec)
            return
        buffer = np.empty(sizes, self.array.dtype)
        _fill(buffer, extent, self.array.codec)
        place[...] = part_of(buffer, _moved(common, [low for low, _ in bounds]))


class ValueReader:
    """One stored value, decoded from front to back as far as it is asked for."""

    def __init__(self, open_value: Callable[[Value], AbstractContextManager[Any]], value: Value, codec: str | None):
        import zstandard

        self.at = 0
        self._held = ExitStack()
        self._extent = _extent(self._held.enter_context(open_value(value)), value)
        self._reader: Any = self._extent
        if codec == "zstd":
            extent: Any = self._extent
            self._reader = zstandard.ZstdDecompressor().stream_reader(
                extent, read_size=_READ_BYTES, read_across_frames=True
            )

    def read_at(self, start: int, view: memoryview) -> None:
        """Fill `view` with the decoded bytes from `start` on, which is not before what was read last."""
        if self._reader is self._extent:
            self._extent.skip(start - self.at)
            self.at = start
        else:
            scratch = memoryview(bytearray(min(_READ_BYTES, start - self.at)))
            while self.at < start:
                self._read(scratch[: start - self.at])
        self._read(view)

    def _read(self, view: memoryview) -> None:
        filled = _decoded(self._reader, view)
        self.at += filled
        if filled != len(view):
            raise Undecodable(f"decodes to {self.at:,} bytes, fewer than its shape")

    def close(self, is_whole: bool = False) -> None:
        """Let the file go; once the whole value was read, nothing may be left of it."""
        is_more = is_whole and bool(_more(self._reader))
        self._held.close()
        if is_more:
            raise Undecodable("decodes to more than its shape")


def _decoded(reader: Any, view: memoryview) -> int:
    import zstandard

    try:
        return _read_into(reader, view)
    except zstandard.ZstdError as error:
        raise Undecodable(f"not zstd, or damaged: {error}") from None


def _more(reader: Any) -> bytes:
    import zstandard

    try:
        return reader.read(1)
    except zstandard.ZstdError as error:
        raise Undecodable(f"not zstd, or damaged: {error}") from None


def _moved(spans: Iterable[tuple[int, int]], origin: Iterable[int]) -> list[tuple[int, int]]:
    return [(a - low, b - low) for (a, b), low in zip(spans, origin, strict=True)]


class Undecodable(Exception):
    """Why a stored value cannot be decoded."""


@dataclass
class _Extent:
    """Part of an open file, read from front to back; safe to share the file with other threads."""

    file: Any  # a file, or the bytes of a value that lies in the index
    start: int
    length: int
    _at: int = 0

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`."""
        size = min(size, self.length - self._at)
        data = pread(self.file, size, self.start + self._at) if size else b""
        if size and not data:
            raise EOFError("its file is cut short")
        self._at += len(data)
        return data

    def skip(self, count: int) -> None:
        """Leave bytes out."""
        self._at += count

    def part(self, offset: int, length: int) -> "_Extent":
        """Part of this part."""
        if offset + length > self.length:
            raise Undecodable("its shard names bytes past its end")
        return _Extent(self.file, self.start + offset, length)


def _extent(file: Any, value: Value) -> _Extent:
    return _Extent(file, value.offset, file.load() if value.length == UNKNOWN else value.length)


def touched_values(values: Mapping[str, Value], array: ZarrArray, index: tuple[slice, ...]) -> Iterator[Value]:
    """The stored values that a region touches, of those that there are."""
    for position in _touched(array.value_shape, index):
        value = values.get(array.key(position))
        if value is not None:
            yield value


def _fill(place: np.ndarray, extent: _Extent, codec: str | None) -> None:
    """Decode exactly as many bytes as the place holds."""
    import zstandard

    view = memoryview(place.reshape(-1).view(np.uint8)) if place.size else memoryview(b"")
    reader: Any = extent
    if codec == "zstd":
        reader = zstandard.ZstdDecompressor().stream_reader(reader, read_size=_READ_BYTES, read_across_frames=True)
    filled = _decoded(reader, view)
    is_more = bool(_more(reader))
    if filled != len(view) or is_more:
        raise Undecodable(
            f"decodes to {'more' if is_more else f'{filled:,} bytes, fewer'} than its {len(view):,} bytes"
        )


def _read_into(reader: Any, view: memoryview) -> int:
    filled = 0
    while filled < len(view):
        if hasattr(reader, "readinto"):
            count = reader.readinto(view[filled:])
        else:
            data = reader.read(min(_READ_BYTES, len(view) - filled))
            count = len(data)
            view[filled : filled + count] = data
        if not count:
            break
        filled += count
    return filled


def _shard_index(extent: _Extent, per_shard: Position) -> np.ndarray:
    """`[..., 2]`: offset and length of each chunk of a shard, from its last bytes, which end in their CRC-32C."""
    count = int(np.prod(per_shard, dtype=np.int64))
    size = 16 * count + 4
    if size > extent.length:
        raise Undecodable("its shard is cut short")
    tail = extent.part(extent.length - size, size)
    data = bytearray()
    while len(data) < size:
        data += tail.read(size - len(data))
    if crc32c(bytes(data[:-4])) != int.from_bytes(data[-4:], "little"):
        raise Undecodable("the index of its shard is damaged (CRC-32C)")
    return np.frombuffer(bytes(data[:-4]), "<u8").reshape(*per_shard, 2)


@lru_cache(maxsize=1)
def _crc_table() -> tuple[int, ...]:
    def entry(byte: int) -> int:
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        return byte

    return tuple(entry(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum of a few bytes."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _touched(sizes: tuple[int, ...], index: tuple[slice, ...]) -> Iterator[Position]:
    """The positions of the grid cells of these sizes that a region touches."""
    return itertools.product(
        *(range(s.start // size, -(-s.stop // size)) for s, size in zip(index, sizes, strict=True))
    )
