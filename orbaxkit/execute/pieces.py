"""Outputs that only select, join and cast parts of leaves: which stored part goes where."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from orbaxkit.planning.nodes import Cast, Concat, Constant, Expr, Fill, Index, Read, Slice, Stack
from orbaxkit.planning.regions import Spans


@dataclass(frozen=True)
class Piece:
    """`stored` is a part of what `leaf` reads (or of a constant); it fills `place` of the part of the output at hand.

    Both have the same elements in the same order; axes of size 1 may differ. `casts` are applied on the way, in order.
    """

    leaf: Expr  # a Read or a Fill
    stored: Spans
    place: Spans
    casts: tuple[np.dtype, ...]


@dataclass(frozen=True)
class _Place:
    """Where a node's region lies in the output's part: `axes` says which axis of the part each of its axes is."""

    spans: Spans
    axes: tuple[int | None, ...]
    casts: tuple[np.dtype, ...] = ()

    def without(self, axis: int, at: int) -> "_Place":
        """One position of an axis that the node adds."""
        return replace(self, spans=self._with(axis, (at, at + 1)), axes=self.axes[:axis] + self.axes[axis + 1 :])

    def within(self, axis: int, span: tuple[int, int]) -> "_Place":
        """A range of an axis."""
        return replace(self, spans=self._with(axis, span))

    def with_hidden(self, axis: int) -> "_Place":
        """An axis that the node takes away."""
        return replace(self, axes=(*self.axes[:axis], None, *self.axes[axis:]))

    def _with(self, axis: int, span: tuple[int, int]) -> Spans:
        at = self.axes[axis]
        if at is None:
            return self.spans
        first = self.spans[at][0]
        return (*self.spans[:at], (first + span[0], first + span[1]), *self.spans[at + 1 :])


def full(shape: tuple[int, ...]) -> Spans:
    """The part that is everything."""
    return tuple([(0, size) for size in shape])


def lengths(spans: Spans) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple([stop - start for start, stop in spans])


def volume(spans: Spans) -> int:
    """How many elements a part has."""
    return math.prod(lengths(spans))


def slices(spans: Spans) -> tuple[slice, ...]:
    """A part as an index."""
    return tuple([slice(*span) for span in spans])


def is_gathered(expr: Expr) -> bool:
    """Whether an output takes nothing but selecting, joining and casting, so that no kernel is needed."""
    pending = [expr]
    while pending:
        node = pending.pop()
        if isinstance(node, Fill):
            if isinstance(node.value, Constant) and not isinstance(node.value.array, np.ndarray):
                return False
        elif not isinstance(node, (Read, Cast, Index, Slice, Stack, Concat)):
            return False
        pending.extend(node.children)
    return True


def gathered_parts(expr: Expr) -> list[Expr]:
    """The largest parts of an expression that need no kernel."""
    return [expr] if is_gathered(expr) else [part for x in expr.children for part in gathered_parts(x)]


def pieces(expr: Expr, part: Spans) -> Iterator[Piece]:
    """The pieces that a part of a gathered output is made of."""
    yield from _pieces(expr, part, _Place(full(lengths(part)), tuple(range(len(part)))))


def _pieces(node: Expr, spans: Spans, place: _Place) -> Iterator[Piece]:
    match node:
        case Read() | Fill():
            yield Piece(node, spans, place.spans, place.casts)
        case Cast(x, to):
            yield from _pieces(x, spans, replace(place, casts=(to, *place.casts)))
        case Index(x, axis, i):
            yield from _pieces(x, (*spans[:axis], (i, i + 1), *spans[axis:]), place.with_hidden(axis))
        case Slice(x, axis, start, _):
            low, high = spans[axis]
            yield from _pieces(x, (*spans[:axis], (low + start, high + start), *spans[axis + 1 :]), place)
        case Stack(xs, axis):
            low, high = spans[axis]
            for i in range(low, high):
                yield from _pieces(xs[i], spans[:axis] + spans[axis + 1 :], place.without(axis, i - low))
        case Concat(xs, axis):
            yield from _concat_pieces(xs, axis, spans, place)


def _concat_pieces(xs: tuple[Expr, ...], axis: int, spans: Spans, place: _Place) -> Iterator[Piece]:
    low, high = spans[axis]
    offset = 0
    for x in xs:
        first, last = max(low - offset, 0), min(high - offset, x.shape[axis])
        if first < last:
            inner = (*spans[:axis], (first, last), *spans[axis + 1 :])
            yield from _pieces(x, inner, place.within(axis, (first + offset - low, last + offset - low)))
        offset += x.shape[axis]
