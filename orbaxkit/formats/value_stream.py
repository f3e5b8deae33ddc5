"""Encode one stored value, a chunk or a shard of chunks, from the parts of a leaf as they come."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from orbaxkit.formats.decoding import crc32c
from orbaxkit.formats.ocdbt_writer import ValueWriter
from orbaxkit.formats.orbax_documents import zstd_level
from orbaxkit.formats.sinks import Spans
from orbaxkit.formats.zarr import ZarrArray

_ZEROS = bytes(64 << 10)
_NO_CHUNK = 2**64 - 1

Position = tuple[int, ...]


def slabs(spans: Spans, itemsize: int, most_bytes: int) -> Iterator[Spans]:
    """A region cut into runs of rows of at most so many bytes, in C order; a single element is never cut."""
    if math.prod(b - a for a, b in spans) * itemsize <= most_bytes or not spans:
        yield spans
        return
    (start, stop), rest = spans[0], spans[1:]
    rows = max(1, most_bytes // (math.prod(b - a for a, b in rest) * itemsize))
    for low in range(start, stop, rows):
        for inner in slabs(rest, itemsize, most_bytes):
            yield ((low, min(low + rows, stop)), *inner)


def region(sizes: tuple[int, ...], position: Position, shape: tuple[int, ...]) -> Spans:
    """What of an array the grid cell at a position covers."""
    return tuple([(at * size, min((at + 1) * size, n)) for at, size, n in zip(position, sizes, shape, strict=True)])


def value_parts(array: ZarrArray, position: Position, most_bytes: int) -> Iterator[Spans]:
    """The parts that the stored value at a position is made of, in order."""
    for chunk in _chunks(array, position):
        yield from slabs(region(array.chunk_shape, chunk, array.shape), array.dtype.itemsize, most_bytes)


def _chunks(array: ZarrArray, position: Position) -> Iterator[Position]:
    """The chunks in a stored value, in the grid of chunks; those beyond the edge are left out."""
    per_value = _per_value(array)
    inside = [range(p * n, (p + 1) * n) for p, n in zip(position, per_value, strict=True)]
    for chunk in product(*inside):
        if all(at * size < n for at, size, n in zip(chunk, array.chunk_shape, array.shape, strict=True)):
            yield chunk


def _per_value(array: ZarrArray) -> tuple[int, ...]:
    return tuple([v // c for v, c in zip(array.value_shape, array.chunk_shape, strict=True)])


@dataclass
class ValueStream:
    """A stored value being encoded into a store, never with more in memory than a part."""

    array: ZarrArray
    position: Position
    writer: ValueWriter
    most_bytes: int
    _expected: Iterator[Spans] = field(init=False)
    _next: Spans | None = field(init=False)
    _chunk: Position | None = None
    _chunk_start: int = 0  # in the value
    _encoder: Any = None
    _done: int = 0  # decoded bytes of the chunk
    _entries: dict[Position, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expected = value_parts(self.array, self.position, self.most_bytes)
        self._next = next(self._expected, None)

    def write(self, spans: Spans, data: np.ndarray) -> bool:
        """The next part; True once the value is whole."""
        if spans != self._next:
            raise ValueError(f"the parts of a stored value come in order: {self._next} is next, not {spans}")
        chunk = tuple([a // size for (a, _), size in zip(spans, self.array.chunk_shape, strict=True)])
        if chunk != self._chunk:
            self._finish_chunk()
            self._start_chunk(chunk)
        self._pad_to(self._offset(spans))
        self._encode(self._rows(spans, data))
        self._next = next(self._expected, None)
        if self._next is None:
            self._finish_chunk()
            self._write_index()
            self.writer.finish()
        return self._next is None

    def _offset(self, spans: Spans) -> int:
        """Where in its chunk a part begins, in bytes."""
        at = 0
        for (start, _), size in zip(spans, self.array.chunk_shape, strict=True):
            at = at * size + start % size
        return at * self.array.dtype.itemsize

    def _rows(self, spans: Spans, data: np.ndarray) -> memoryview:
        """A part's bytes, its rows as long as the chunk's: an axis after the first cut one is whole."""
        shape = [b - a for a, b in spans]
        first = next((i for i, n in enumerate(shape) if n > 1), len(shape))
        padded = [*shape[: first + 1], *self.array.chunk_shape[first + 1 :]]
        if padded != shape:
            out = np.zeros(padded, self.array.dtype)
            out[tuple(slice(n) for n in shape)] = data
            data = out
        return memoryview(np.ascontiguousarray(data, self.array.dtype).reshape(-1).view(np.uint8))

    def _start_chunk(self, chunk: Position) -> None:
        self._chunk, self._chunk_start, self._done = chunk, self.writer.size, 0
        if self.array.codec == "zstd":
            import zstandard

            encoder = zstandard.ZstdCompressor(level=zstd_level(self.array))
            self._encoder = encoder.compressobj(size=self._chunk_bytes)

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self.array.chunk_shape) * self.array.dtype.itemsize

    def _encode(self, data: bytes | memoryview) -> None:
        self._done += len(data)
        packed = self._encoder.compress(data) if self._encoder is not None else data
        if packed:
            self.writer.write(packed)

    def _pad_to(self, end: int) -> None:
        while self._done < end:
            self._encode(_ZEROS[: end - self._done])

    def _finish_chunk(self) -> None:
        if self._chunk is None:
            return
        self._pad_to(self._chunk_bytes)
        if self._encoder is not None:
            self.writer.write(self._encoder.flush())
        inside = tuple(at % n for at, n in zip(self._chunk, _per_value(self.array), strict=True))
        self._entries[inside] = self._chunk_start, self.writer.size - self._chunk_start

    def _write_index(self) -> None:
        """A shard ends in the offset and length of each of its chunks, and their CRC-32C."""
        if self.array.shard_shape is None:
            return
        index = np.full((*_per_value(self.array), 2), _NO_CHUNK, "<u8")
        for inside, entry in self._entries.items():
            index[inside] = entry
        data = index.tobytes()
        self.writer.write(data + crc32c(data).to_bytes(4, "little"))
