"""Outputs in pieces that fit a budget: which parts are made together, what that costs, and making them on the host."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orbaxkit.execute.gather import Allocate, on_host
from orbaxkit.execute.pieces import full, gathered_parts, is_gathered, volume
from orbaxkit.execute.reading import ALIGNMENT, aligned_empty
from orbaxkit.execute.restricting import restrict
from orbaxkit.execute.sequential import LARGE_BYTES, find_run
from orbaxkit.formats import Source, part_of
from orbaxkit.formats.items import stored
from orbaxkit.planning import Expr
from orbaxkit.planning.nodes import Affine, Cast, Index, Read, Slice
from orbaxkit.planning.regions import Spans, needed
from orbaxkit.specs import LeafSpec

# Values decoded at the same time, each of which may need a buffer of its own.
DECODED_AT_ONCE = 4
_SLAB_BYTES = 16 << 20
_IN_ORDER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Window:
    """A box of an output that is made at once, and the parts of it that are handed out one by one."""

    name: str
    expr: Expr
    box: Spans
    parts: tuple[Spans, ...]
    cost: int
    is_alone: bool = False  # made by itself, so that a large stored value can be decoded in order

    def views(self, array: np.ndarray) -> Iterator[tuple[Spans, np.ndarray]]:
        """Each part and its data, a view of the box's."""
        origin = [low for low, _ in self.box]
        for part in self.parts:
            inside = [(a - low, b - low) for (a, b), low in zip(part, origin, strict=True)]
            yield part, part_of(array, inside)


@dataclass
class Arena:
    """Memory that is handed out, taken back all at once and used again: untouched pages are what costs time."""

    _block: np.ndarray = field(default_factory=lambda: aligned_empty((0,), np.dtype(np.uint8)))
    _used: int = 0
    _wanted: int = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised C-ordered array, of this block where there is room."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._used
        self._wanted += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._block.nbytes:
            return aligned_empty(shape, dtype)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._block[start : start + nbytes].view(dtype).reshape(shape)

    def reset(self, at_least: int = 0) -> None:
        """Take everything back; no array that was handed out may be used any more."""
        if at_least > self._block.nbytes:
            self._block = aligned_empty((0,), np.dtype(np.uint8))  # free the old one first
            self._block = aligned_empty((at_least,), np.dtype(np.uint8))
        self._used = self._wanted = 0


def evaluate(windows: Sequence[Window], source: Source, allocate: Allocate = aligned_empty) -> list[np.ndarray]:
    """The boxes of the windows, each chunk that they need decoded once; PRNG keys with the axis of their words."""
    return on_host([restrict(window.expr, window.box) for window in windows], source, allocate)


def windows_of(name: str, expr: Expr, parts: Iterable[Spans], source: Source, most: int | None) -> Iterator[Window]:
    """Consecutive parts of an output joined to boxes whose cost is at most `most` where that is possible.

    Without `most`, an output whose parts cannot be read one after the other is made whole.
    """
    pending = list(parts)
    if not pending:
        return
    whole = _window(name, expr, pending, source)
    in_order = is_sequential(expr, source)
    limit = most if most is not None else _IN_ORDER_BYTES if in_order else whole.cost
    if whole.cost <= limit:
        yield replace(whole, is_alone=in_order)
        return
    while pending:
        window, count = _largest(name, expr, pending, source, limit)
        yield replace(window, is_alone=in_order)
        del pending[:count]


def _largest(name: str, expr: Expr, parts: list[Spans], source: Source, limit: int) -> tuple[Window, int]:
    """The longest run of parts that fill a box within the limit; one part at least."""
    best, count = _window(name, expr, parts[:1], source), 1
    size = volume(parts[0])
    box = parts[0]
    for k, part in enumerate(parts[1:], 2):
        box = tuple([(min(a, c), max(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)])
        size += volume(part)
        if volume(box) * (expr.dtype.itemsize if expr.dtype else 1) > limit:
            break
        if size == volume(box):
            window = _window(name, expr, parts[:k], source)
            if window.cost > limit:
                break
            best, count = window, k
    return best, count


def _window(name: str, expr: Expr, parts: list[Spans], source: Source) -> Window:
    box = tuple([(min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*parts, strict=True)])
    return Window(name, expr, box, tuple(parts), cost_of(expr, box, source))


def cost_of(expr: Expr, box: Spans, source: Source) -> int:
    """The bytes that making a box takes: itself, what is read for it and decoded on the way."""
    part = restrict(expr, box)
    own = _nbytes(part)
    total = 0 if _is_direct(part) else sum(_nbytes(node) for node in gathered_parts(part) if node is not part)
    for (foreign, name), regions in needed([part]).items():
        held = source if foreign is None else foreign.source
        spec = held.specs[name]
        itemsize = spec.dtype.itemsize if spec.dtype is not None else 1
        for region in regions:
            spans = tuple([(s.start, s.stop) for s in region])
            total += 0 if _is_direct(part) else volume(spans) * itemsize
            total += _decoding_bytes(held, name, spec, spans)
    return own + total


def _is_direct(expr: Expr) -> bool:
    """Whether it is read straight to its place."""
    while not isinstance(expr, Read):
        if len(expr.children) != 1 or not is_gathered(expr) or expr.dtype != expr.children[0].dtype:
            return False
        if getattr(expr, "axis", 0) != 0:
            return False
        expr = expr.children[0]
    return True


def _nbytes(expr: Expr) -> int:
    size = math.prod(expr.shape + expr.element.words)
    return size * (expr.dtype.itemsize if expr.dtype is not None else 0)


def _decoding_bytes(source: Source, name: str, spec: LeafSpec, spans: Spans) -> int:
    """The buffers for values that do not fit their place whole."""
    chunk = spec.chunk_shape
    if chunk is None or len(chunk) != len(spans) or 0 in chunk or spec.dtype is None:
        return 0
    counts = [-(-b // c) - a // c for (a, b), c in zip(spans, chunk, strict=True)]
    is_slab = all(a == 0 and b == c for (a, b), c in zip(spans[1:], chunk[1:], strict=True))
    first_is_whole = not spans or (spans[0][0] % chunk[0] == 0 and spans[0][1] % chunk[0] == 0)
    if is_slab and first_is_whole:
        return 0
    found = stored(source, name)
    if found is not None and find_run(found, spans) is not None:
        return 0
    return math.prod(chunk) * spec.dtype.itemsize * min(DECODED_AT_ONCE, math.prod(counts))


def is_sequential(expr: Expr, source: Source) -> bool:
    """Whether parts of a leaf can be read in order out of large stored values without decoding anything twice."""
    while not isinstance(expr, Read):
        if type(expr) not in (Cast, Affine) and not (type(expr) in (Index, Slice) and expr.axis == 0):
            return False
        expr = expr.children[0]
    found = stored(source, expr.name) if expr.source is None else None
    if found is None or found.array.shard_shape is not None or found.array.codec is None:
        return False
    if found.array.value_bytes < LARGE_BYTES:
        return False
    return all(size <= step for size, step in zip(found.array.shape[1:], found.array.value_shape[1:], strict=True))


def slabs(spec: LeafSpec, most: int = _SLAB_BYTES) -> Iterator[Spans]:
    """An array cut along its first axes, in C order, into parts of at most `most` bytes; words of keys stay whole."""
    shape, itemsize = spec.data_shape, spec.dtype.itemsize if spec.dtype is not None else 1
    axis = next(
        (k for k in range(len(spec.shape)) if math.prod(shape[k + 1 :]) * itemsize <= most), len(spec.shape) - 1
    )
    if 0 in shape:
        return
    if axis < 0 or spec.nbytes <= most:
        yield full(shape)
        return
    rows = max(1, most // (math.prod(shape[axis + 1 :]) * itemsize))
    if spec.chunk_shape is not None and axis < len(spec.chunk_shape) and 1 < spec.chunk_shape[axis] < rows:
        rows = rows // spec.chunk_shape[axis] * spec.chunk_shape[axis]
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], rows):
            fixed = tuple([(i, i + 1) for i in outer])
            yield (*fixed, (start, min(start + rows, shape[axis])), *full(shape[axis + 1 :]))
