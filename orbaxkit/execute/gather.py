"""Read the pieces of many outputs so that no stored chunk is decoded twice."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from orbaxkit.execute.pieces import Piece, full, gathered_parts, lengths, pieces, slices, volume
from orbaxkit.execute.reading import BoundedReads, aligned_empty
from orbaxkit.formats import Source, part_of
from orbaxkit.formats.items import expect
from orbaxkit.planning.host import cast_host, evaluate, step
from orbaxkit.planning.nodes import Expr, Fill, Read, fold
from orbaxkit.planning.regions import Spans
from orbaxkit.specs import LeafSpec

# Makes an uninitialised C-ordered array of a shape and dtype.
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass
class _Part:
    """One part of an output being put together on the host; `done` gets it when its last piece is there."""

    shape: tuple[int, ...]
    dtype: np.dtype
    missing: int
    done: Callable[[np.ndarray], Any]
    allocate: Allocate
    _host: np.ndarray | None = None

    @property
    def host(self) -> np.ndarray:
        """The buffer, made when the first piece arrives."""
        if self._host is None:
            self._host = self.allocate(self.shape, self.dtype)
        return self._host

    def arrived(self) -> None:
        """Count a piece that is in place."""
        self.missing -= 1
        if self.missing == 0:
            host, self._host = self.host, None
            self.done(host)


@dataclass(frozen=True)
class _Task:
    """A piece, the stored part that it reads (with the words of keys), and the part that waits for it."""

    piece: Piece
    stored: Spans
    part: _Part

    @property
    def place(self) -> np.ndarray:
        """The view that the piece fills."""
        return part_of(self.part.host, self.piece.place)

    def direct(self) -> np.ndarray | None:
        """The place in the piece's own shape, where it can be read there without a copy."""
        place = self.place
        is_direct = not self.piece.casts and place.flags.c_contiguous and place.dtype == self.piece.leaf.dtype
        return place.reshape(lengths(self.stored)) if is_direct else None

    def deliver(self, data: np.ndarray) -> None:
        """Cast and put in place."""
        for dtype in self.piece.casts:
            data = cast_host(data, dtype)
        place = self.place
        place[...] = data.reshape(place.shape)
        self.part.arrived()


@dataclass
class Gather:
    """Collects what is wanted from sources, then reads each needed chunk once, with a bound on what is in flight."""

    source: Source
    allocate: Allocate = aligned_empty
    _tasks: dict[Expr, list[_Task]] = field(default_factory=dict)

    def want(self, expr: Expr, part: Spans, done: Callable[[np.ndarray], Any]) -> None:
        """Ask for a part of a gathered output; `done(host)` runs when it is there."""
        found = list(pieces(expr, part))
        waiting = _Part(lengths(part) + expr.element.words, expr.dtype, len(found), done, self.allocate)
        if not found:
            waiting.missing = 1
            waiting.arrived()
        for piece in found:
            task = _Task(piece, piece.stored + full(piece.leaf.element.words), waiting)
            value = self._value(piece.leaf)
            if value is not None:
                task.deliver(part_of(value, piece.stored))
            else:
                self._tasks.setdefault(piece.leaf, []).append(task)

    def _value(self, leaf: Expr) -> np.ndarray | None:
        """What is known without reading an array: constants and numbers."""
        if isinstance(leaf, Fill):
            return evaluate(leaf, lambda read: np.empty(0))
        return np.asarray(_source_of(leaf, self.source).value(leaf.name), leaf.dtype) if leaf.kind == "scalar" else None

    def run(self) -> None:
        """Read everything that was asked for."""
        reads = BoundedReads()
        own = ((leaf.name, tasks) for leaf, tasks in self._tasks.items() if leaf.source is None)
        expect(self.source, ((name, slices(task.stored)) for name, tasks in own for task in tasks))
        for leaf, tasks in self._tasks.items():
            source = _source_of(leaf, self.source)
            for together in _sharing_chunks(tasks, source.specs[leaf.name]):
                _read(reads, source, leaf.name, together, self.allocate)
        reads.finish()
        self._tasks.clear()


def on_host(exprs: Sequence[Expr], source: Source, allocate: Allocate = aligned_empty) -> list[np.ndarray]:
    """Values computed with numpy, each chunk that they need decoded once; PRNG keys with the axis of their words."""
    gather = Gather(source, allocate)
    done: dict[int, np.ndarray] = {}
    for part in (part for expr in exprs for part in gathered_parts(expr)):
        if id(part) not in done:
            done[id(part)] = np.empty(0)
            gather.want(part, full(part.shape), partial(done.__setitem__, id(part)))
    gather.run()
    return [np.asarray(array) for array in fold(exprs, lambda node, xs: step(node, xs, _no_read), done)]


def _no_read(leaf: Read) -> np.ndarray:
    raise AssertionError(f"{leaf.name} is read by the gather")


def _source_of(leaf: Expr, source: Source) -> Source:
    return source if leaf.source is None else leaf.source.source


def _read(reads: BoundedReads, source: Source, name: str, tasks: list[_Task], allocate: Allocate) -> None:
    """Read one piece to its place, or the box around several once, and share it out."""
    box = _box([task.stored for task in tasks])
    direct = tasks[0].direct() if len(tasks) == 1 else None
    if direct is not None:
        reads.start(source, name, slices(box), direct, lambda _: tasks[0].part.arrived())
        return
    out = allocate(lengths(box), tasks[0].piece.leaf.dtype)

    def share(data: np.ndarray) -> None:
        for task in tasks:
            inside = tuple((a - low, b - low) for (a, b), (low, _) in zip(task.stored, box, strict=True))
            task.deliver(part_of(data, inside))

    reads.start(source, name, slices(box), out, share)


def _box(parts: list[Spans]) -> Spans:
    """The smallest part that holds all of them."""
    return tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*parts, strict=True))


def _sharing_chunks(tasks: list[_Task], spec: LeafSpec) -> Iterable[list[_Task]]:
    """Tasks that need the same chunks together; all together where even that would decode chunks twice."""
    if len(tasks) == 1:
        return [tasks]
    by_chunks: dict[Spans, list[_Task]] = {}
    for task in tasks:
        by_chunks.setdefault(_chunk_aligned(task.stored, spec), []).append(task)
    by_chunks = _joined(by_chunks)
    if sum(volume(box) for box in by_chunks) > volume(_box(list(by_chunks))):
        return [tasks]
    return by_chunks.values()


def _joined(groups: dict[Spans, list[_Task]]) -> dict[Spans, list[_Task]]:
    """Boxes that overlap as one, where reading that takes less than reading both."""
    joined: dict[Spans, list[_Task]] = {}
    last: Spans | None = None
    for box in sorted(groups):
        tasks = groups[box]
        both = box if last is None else _box([last, box])
        if last is not None and volume(both) < volume(last) + volume(box):
            tasks, box = joined.pop(last) + tasks, both
        joined[box] = joined.get(box, []) + tasks
        last = box
    return joined if len(joined) == len(groups) else _joined(joined)


def _chunk_aligned(spans: Spans, spec: LeafSpec) -> Spans:
    chunks = spec.chunk_shape or spec.data_shape
    return tuple(
        (start // chunk * chunk, min(-(-stop // chunk) * chunk, size)) if chunk else (start, stop)
        for (start, stop), chunk, size in zip(spans, chunks, spec.data_shape, strict=True)
    )
