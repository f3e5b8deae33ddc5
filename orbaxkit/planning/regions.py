"""Which regions of the leaves an expression needs, and how many stored bytes hold them."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from orbaxkit.planning.nodes import (
    Concat,
    Expr,
    Fill,
    Foreign,
    Index,
    MergeLora,
    Read,
    Reshape,
    Slice,
    Stack,
    Transpose,
    Unreplicate,
)
from orbaxkit.specs import LeafSpec

Region = tuple[slice, ...]
Span = tuple[int, int]
Spans = tuple[Span, ...]


def needed(roots: Iterable[Expr]) -> dict[tuple[Foreign | None, str], list[Region]]:
    """The distinct regions of each leaf that the expressions read, in the stored array's coordinates."""
    found: dict[tuple[Foreign | None, str], dict[Spans, None]] = {}
    seen: set[tuple[int, Spans]] = set()
    pending = [(root, tuple([(0, size) for size in root.shape])) for root in roots]
    pending.reverse()
    while pending:
        node, spans = pending.pop()
        if isinstance(node, Read):
            spans += tuple([(0, size) for size in node.element.words])
            found.setdefault((node.source, node.name), {})[spans] = None
        elif (id(node), spans) not in seen:
            seen.add((id(node), spans))
            pending.extend(reversed(list(pull_back(node, spans))))
    return {key: [tuple([slice(*span) for span in spans]) for spans in _without_covered(f)] for key, f in found.items()}


def pull_back(node: Expr, spans: Spans) -> Iterator[tuple[Expr, Spans]]:
    """The region of each child that a region of the node is made of."""
    match node:
        case Read() | Fill():
            return
        case Index(x, axis, i):
            yield x, (*spans[:axis], (i, i + 1), *spans[axis:])
        case Unreplicate(x, axis):
            yield x, (*spans[:axis], (0, x.shape[axis]), *spans[axis:])
        case Slice(x, axis, start, _):
            low, high = spans[axis]
            yield x, (*spans[:axis], (low + start, high + start), *spans[axis + 1 :])
        case Stack(xs, axis):
            for x in xs[slice(*spans[axis])]:
                yield x, spans[:axis] + spans[axis + 1 :]
        case Concat(xs, axis):
            yield from _pull_concat(xs, axis, spans)
        case Transpose(x, perm):
            back: list[Span] = [(0, 0)] * len(perm)
            for span, p in zip(spans, perm, strict=True):
                back[p] = span
            yield x, tuple(back)
        case Reshape(x, shape):
            yield x, _pull_reshape(x.shape, shape, spans)
        case MergeLora(w, a, b):
            yield w, spans
            yield a, (*spans[:-1], (0, a.shape[-1]))
            heads = ((0, b.shape[-3]),) if node.form == "summed_heads" else spans[-3:-2]
            yield b, (*spans[:-3], *heads, (0, b.shape[-2]), spans[-1])
        case _:  # Cast and Affine work element by element
            yield node.x, spans


def touched_bytes(spec: LeafSpec, regions: Iterable[Region]) -> int:
    """The stored bytes of the chunks that the regions touch, taking chunks to be alike in size."""
    stored = spec.nbytes if spec.stored_bytes is None else spec.stored_bytes
    shape, chunk = spec.data_shape, spec.chunk_shape
    regions = list(regions)
    if (
        chunk is None
        or len(chunk) != len(shape)
        or 0 in chunk
        or 0 in shape
        or any(len(r) != len(shape) for r in regions)
    ):
        return stored if regions else 0
    grid = tuple(-(-size // step) for size, step in zip(shape, chunk, strict=True))
    return math.ceil(stored * _touched(regions, chunk, grid) / math.prod(grid))


def _touched(regions: list[Region], chunk: tuple[int, ...], grid: tuple[int, ...]) -> int:
    boxes = {
        tuple([(s.start // c, -(-s.stop // c)) for s, c in zip(region, chunk, strict=True)])
        for region in regions
        if all(s.start < s.stop for s in region)
    }
    if len(boxes) <= 1:
        return sum(math.prod(high - low for low, high in box) for box in boxes)
    mask = np.zeros(grid, bool)
    for box in boxes:
        mask[tuple([slice(*span) for span in box])] = True
    return int(mask.sum())


def _without_covered(found: dict[Spans, None]) -> list[Spans]:
    """The regions without those that lie in the largest one (a leaf read whole and in parts is read whole)."""
    largest = max(found, key=lambda spans: math.prod(high - low for low, high in spans))
    return [spans for spans in found if spans is largest or not _inside(spans, largest)]


def _inside(inner: Spans, outer: Spans) -> bool:
    return all(b[0] <= a[0] and a[1] <= b[1] for a, b in zip(inner, outer, strict=True))


def _pull_concat(xs: tuple[Expr, ...], axis: int, spans: Spans) -> Iterator[tuple[Expr, Spans]]:
    offset = 0
    for x in xs:
        size = x.shape[axis]
        low, high = max(spans[axis][0] - offset, 0), min(spans[axis][1] - offset, size)
        if low < high or size == 0:  # an empty part is used, too
            yield x, (*spans[:axis], (low, max(low, high)), *spans[axis + 1 :])
        offset += size


def _pull_reshape(source: tuple[int, ...], shape: tuple[int, ...], spans: Spans) -> Spans:
    """Axis group by axis group: the smallest box of the source that holds the region's elements."""
    if any(low == high for low, high in spans):
        return tuple([(0, size if 0 in source else 0) for size in source])
    out: list[Span] = []
    for ours, theirs in axis_groups(source, shape):
        sizes, part = [shape[k] for k in theirs], [spans[k] for k in theirs]
        first = _flat([low for low, _ in part], sizes)
        last = _flat([high - 1 for _, high in part], sizes)
        out += _box([source[k] for k in ours], first, last)
    return tuple(out)


def axis_groups(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The finest runs of axes of both shapes with equal products."""
    i = j = 0
    while i < len(a) or j < len(b):
        ours: list[int] = []
        theirs: list[int] = []
        left = right = 1
        while not (ours or theirs) or left != right:
            if (left <= right and i < len(a)) or j == len(b):
                ours.append(i)
                left *= a[i]
                i += 1
            else:
                theirs.append(j)
                right *= b[j]
                j += 1
        yield ours, theirs


def _flat(position: list[int], sizes: list[int]) -> int:
    flat = 0
    for p, size in zip(position, sizes, strict=True):
        flat = flat * size + p
    return flat


def _box(sizes: list[int], first: int, last: int) -> list[Span]:
    """The smallest box that holds the elements from flat position `first` to `last`."""
    box: list[Span] = []
    for k in range(len(sizes)):
        inner = math.prod(sizes[k + 1 :])
        low, high = first // inner, last // inner
        box.append((low, high + 1))
        if low != high:
            return box + [(0, s) for s in sizes[k + 1 :]]
        first, last = first - low * inner, last - high * inner
    return box
