"""Undo a plan: the source's leaves as expressions over its outputs."""

import heapq
from collections.abc import Iterator

from orbaxkit.errors import NotInvertibleError
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Expr,
    Index,
    MergeLora,
    Read,
    Reshape,
    Slice,
    Stack,
    Transpose,
    Unreplicate,
)
from orbaxkit.planning.numbers import is_exact_cast
from orbaxkit.planning.plan import Output, Plan

Piece = tuple[int, int, int, Expr]  # axis, start, stop, value


class _Undoing:
    """What is known so far of each expression of the plan: its value, or values of parts of it.

    Expressions are settled from the outputs down to the reads (by falling height), so that all parts of one have
    arrived when its turn comes.
    """

    def __init__(self) -> None:
        self.whole: dict[Expr, Expr] = {}
        self.parts: dict[Expr, list[Piece]] = {}
        self.queue: list[tuple[int, int, Expr]] = []

    def learn(self, expr: Expr, value: Expr) -> None:
        """All of an expression is known."""
        self._enqueue(expr)
        self.whole.setdefault(expr, value)

    def learn_part(self, expr: Expr, piece: Piece) -> None:
        """Some positions along an axis are known."""
        self._enqueue(expr)
        self.parts.setdefault(expr, []).append(piece)

    def _enqueue(self, expr: Expr) -> None:
        if expr not in self.whole and expr not in self.parts:
            heapq.heappush(self.queue, (-expr.height, len(self.whole) + len(self.parts), expr))

    def settle(self) -> dict[str, Expr]:
        """The reads that are known whole."""
        found: dict[str, Expr] = {}
        while self.queue:
            expr = heapq.heappop(self.queue)[2]
            value = self.whole.get(expr)
            if value is None:
                value = _joined(expr, self.parts[expr])
            if value is None:
                continue
            if isinstance(expr, Read):
                if expr.source is None:
                    found.setdefault(expr.name, value)
            else:
                self._undo(expr, value)
        return found

    def _undo(self, node: Expr, value: Expr) -> None:
        """From the value of a node to (parts of) the values of its children."""
        match node:
            case Index(x, axis, i):
                self.learn_part(x, (axis, i, i + 1, value))
            case Slice(x, axis, start, stop):
                self.learn_part(x, (axis, start, stop, value))
            case Stack(xs, axis):
                for i, x in enumerate(xs):
                    self.learn(x, ex.index(value, axis, i))
            case Concat():
                for x, part in _unjoined(node, value):
                    self.learn(x, part)
            case Transpose(x, perm):
                self.learn(x, ex.transpose(value, sorted(range(len(perm)), key=perm.__getitem__)))
            case Reshape(x, _):
                self.learn(x, ex.reshape(value, x.shape))
            case Cast(x, to):
                if is_exact_cast(x.dtype, to):
                    self.learn(x, ex.cast(value, x.dtype))
            case Unreplicate(x, axis):
                self.learn(x, ex.stack([value] * x.shape[axis], axis))


def invert(plan: Plan) -> Plan:
    """See `Plan.inverse`."""
    known = _Undoing()
    for name, output in plan.outputs.items():
        known.learn(output.expr, ex.read(name, plan.specs[name]))
    found = known.settle()
    lost = [(name, _part_text(plan, name)) for name in plan.reads if name not in found]
    if lost:
        reasons = _losses(plan)
        lost = [(name, reasons.get(name, text)) for name, text in lost]
        raise NotInvertibleError(
            f"{len(lost)} of the {len(plan.reads)} leaves that are read cannot be computed back",
            leaves=lost,
            hint="select the others first: the inverse is exact on leaves that are read whole and not rounded",
        )
    outputs = {name: Output(plan.source.paths[name], found[name]) for name in plan.source if name in found}
    return Plan(plan.specs, outputs, plan.source.containers)


def _joined(expr: Expr, pieces: list[Piece]) -> Expr | None:
    """The whole from parts that cover one axis, or None."""
    for axis in dict.fromkeys(piece[0] for piece in pieces):
        chosen = _cover([piece for piece in pieces if piece[0] == axis], expr.shape[axis])
        if chosen is None:
            continue
        if all(len(value.shape) < len(expr.shape) for *_, value in chosen):
            return ex.stack([value for *_, value in chosen], axis)
        return ex.concat([_with_axis(value, axis, expr) for *_, value in chosen], axis)
    return None


def _cover(pieces: list[Piece], size: int) -> list[Piece] | None:
    """Pieces that together hold every position once, in order."""
    at, chosen = 0, []
    by_start: dict[int, Piece] = {}
    for piece in pieces:
        known = by_start.get(piece[1])
        if piece[2] > piece[1] and (known is None or known[2] < piece[2]):
            by_start[piece[1]] = piece
    for start in sorted(by_start):
        axis, _, stop, value = by_start[start]
        if start > at:
            return None
        if stop > at:
            chosen.append((axis, at, stop, value if start == at else ex.slice_(value, axis, at - start, stop - start)))
            at = stop
    return chosen if at == size and chosen else None


def _with_axis(value: Expr, axis: int, whole: Expr) -> Expr:
    if len(value.shape) == len(whole.shape):
        return value
    return ex.reshape(value, (*value.shape[:axis], 1, *value.shape[axis:]))


def _unjoined(node: Concat, value: Expr) -> Iterator[tuple[Expr, Expr]]:
    offset = 0
    for x in node.xs:
        size = x.shape[node.axis]
        yield x, ex.slice_(value, node.axis, offset, offset + size)
        offset += size


def _part_text(plan: Plan, name: str) -> str:
    regions = plan.reads[name]
    spans = ", ".join(f"{s.start}:{s.stop}" for s in regions[0])
    return f"is read in part only: [{spans}]{' and elsewhere' if len(regions) > 1 else ''}"


def _losses(plan: Plan) -> dict[str, str]:
    """The first operation that each leaf goes through and that cannot be undone."""
    losses: dict[str, str] = {}
    for output_name, output in plan.outputs.items():
        pending: list[tuple[Expr, str | None]] = [(output.expr, None)]
        seen: set[tuple[int, str | None]] = set()
        while pending:
            node, reason = pending.pop()
            if (id(node), reason) in seen:
                continue
            seen.add((id(node), reason))
            if isinstance(node, Read) and reason:
                losses.setdefault(node.name, f"{reason} in {output_name!r}")
            pending.extend((x, reason or _loss_at(node)) for x in node.children)
    return losses


def _loss_at(node: Expr) -> str | None:
    if isinstance(node, Cast) and not is_exact_cast(node.x.dtype, node.to):
        return f"is cast from {node.x.dtype} to {node.to}, which may round"
    if isinstance(node, Affine):
        return "is scaled or shifted, which rounds"
    return "is merged with a LoRA update" if isinstance(node, MergeLora) else None
