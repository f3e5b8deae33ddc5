"""Outputs whose stored values can be copied as they are: renamed leaves, layers of a stack chunked by layer, …"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbaxkit.execute.pieces import Piece, full, is_gathered, pieces
from orbaxkit.formats import Source
from orbaxkit.formats.decoding import Undecodable
from orbaxkit.formats.files import Folder, pread
from orbaxkit.formats.frames import ReadBytes, has_holes, value_problem
from orbaxkit.formats.items import Stored, stored
from orbaxkit.formats.ocdbt import UNKNOWN, Value
from orbaxkit.formats.sinks import Encoded
from orbaxkit.formats.stores import announce
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.planning.nodes import Expr, Fill, Index, Read, Slice, Stack, Transpose, Unreplicate
from orbaxkit.planning.regions import Spans

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """An output as an array made of stored values of others: the key that each gets, and where it lies."""

    array: ZarrArray
    values: tuple[tuple[str, Stored, Value], ...]

    @property
    def nbytes(self) -> int:
        """The encoded bytes."""
        return sum(value.length for _, _, value in self.values)

    def encoded(self) -> Iterator[tuple[str, Encoded]]:
        """Each value under its new key. Raises Undecodable: it is cut short, as far as can be told undecoded."""
        for key, found, value in self.values:
            with found.open(value) as file:
                problem = value_problem(_reader(file, value), value.length, found.array)
                if problem:
                    raise Undecodable(f"chunk {key}{f' in {value.file}' if value.file else ''}: {problem}")
                yield key, Encoded(value.length, file, value.offset, found.folder.where(value.file))


def announce_all(copies: Iterable[Copies]) -> None:
    """Tell every store which of its values will be copied."""
    wanted: dict[int, tuple[Folder, list[Value]]] = {}
    for each in copies:
        for _, found, value in each.values:
            wanted.setdefault(id(found.folder), (found.folder, []))[1].append(value)
    for folder, values in wanted.values():
        announce(folder, values)


def _has_holes(found: Stored, value: Value, position: Sizes) -> bool:
    """Whether a shard lacks a chunk: zeros to some readers and damage to others, so that no copy may carry it on."""
    array = found.array
    if array.shard_shape is None or array.shard_shape == array.chunk_shape:
        return False
    ends = zip(array.shape, array.shard_shape, position, strict=True)
    inside = tuple([min(size, end - at * size) for end, size, at in ends])
    with found.open(value) as file:
        return has_holes(_reader(file, value), value.length, array, inside)


def _reader(file: Any, value: Value) -> ReadBytes:
    """A value's bytes, from those that lie in the index or from its file."""
    return lambda size, at: pread(file, size, value.offset + at)


def chunks_of(expr: Expr, source: Source) -> Sizes | None:
    """How an output is best cut into chunks: as what it is made of, each layer of a stack on its own."""
    match expr:
        case Read(name, _, _, foreign):
            return (source if foreign is None else foreign.source).specs[name].chunk_shape
        case Fill():
            return None
        case Stack(xs, axis):
            inner = chunks_of(xs[0], source)
            return inner and (*inner[:axis], 1, *inner[axis:])
    inner = chunks_of(expr.children[0], source) if expr.children else None
    if inner is None or len(inner) < len(expr.children[0].shape):
        return None
    shape = expr.shape
    match expr:
        case Index(_, axis, _) | Unreplicate(_, axis):
            return (*inner[:axis], *inner[axis + 1 :])
        case Slice(_, axis, _, _):
            return (*inner[:axis], max(1, min(inner[axis], shape[axis])), *inner[axis + 1 :])
        case Transpose(_, perm):
            return (*[inner[p] for p in perm], *inner[len(perm) :])
    return inner if len(expr.children[0].shape) == len(expr.shape) else None


def find_copies(expr: Expr, chunks: Sizes | None, source: Source) -> Copies | None:
    """How to make an output of whole stored values; None where that cannot be."""
    if chunks is None or not is_gathered(expr) or expr.kind in ("scalar", "string", "empty") or 0 in expr.shape:
        return None
    first = next(iter(pieces(expr, full(expr.shape))), None)
    found = None if first is None else _stored(first, source)
    if found is None:
        return None
    array = _like(found.array, expr, chunks)
    values: list[tuple[str, Stored, Value]] = []
    for piece in pieces(expr, full(expr.shape)):
        own = _stored(piece, source)
        copied = None if own is None else _copied(piece, own, array)
        if own is None or copied is None:
            return None
        values += [(key, own, value) for key, value in copied]
    return Copies(array, tuple(values)) if array is not None else None


def _stored(piece: Piece, source: Source) -> Stored | None:
    leaf = piece.leaf
    if piece.casts or not isinstance(leaf, Read):
        return None
    return stored(source if leaf.source is None else leaf.source.source, leaf.name)


def _like(array: ZarrArray, expr: Expr, chunks: Sizes) -> ZarrArray:
    """The array that an output would be with these chunks and the codec of what it is made of."""
    shape = expr.shape + expr.element.words
    same = array.shape == shape
    return replace(
        array,
        shape=shape,
        chunk_shape=array.chunk_shape if same else chunks,
        shard_shape=array.shard_shape if same else None,
    )


def _copied(piece: Piece, found: Stored, array: ZarrArray) -> list[tuple[str, Value]] | None:
    """The stored values of a piece under their keys in the new array, if they are whole there, too."""
    ours = found.array
    words = piece.leaf.element.words
    if (ours.driver, ours.dtype, ours.codec) != (array.driver, array.dtype, array.codec) or ours.codec is None:
        return None
    if (ours.shard_shape is None) != (array.shard_shape is None):  # a shard has an index, even that of one chunk
        return None
    here, there = piece.stored + full(words), piece.place + full(words)
    old, new = _grid(here, ours), _grid(there, array)
    if old is None or new is None or _facts(here, ours) != _facts(there, array):
        return None
    out = []
    for before, after in zip(itertools.product(*old), itertools.product(*new), strict=True):
        value = found.values.get(ours.key(before))
        if value is None or value.length == UNKNOWN or _has_holes(found, value, before):
            return None
        out.append((array.key(after), value))
    return out


def _grid(spans: Spans, array: ZarrArray) -> Sequence[range] | None:
    """The stored values that make up a region, along each axis; None where it cuts one."""
    if any(
        a % size or (b % size and b != end)
        for (a, b), size, end in zip(spans, array.value_shape, array.shape, strict=True)
    ):
        return None
    return [range(a // size, -(-b // size)) for (a, b), size in zip(spans, array.value_shape, strict=True)]


def _facts(spans: Spans, array: ZarrArray) -> list[tuple[int, int, int]]:
    """What must agree for the bytes to mean the same: along each axis, but for those of one element."""
    rows = zip([b - a for a, b in spans], array.value_shape, array.chunk_shape, strict=True)
    return [row for row in rows if row != (1, 1, 1)]
