"""Part of an output as an expression of its own, so that no more is read and computed than that part needs."""

from orbaxkit.execute.pieces import full, lengths, volume
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Expr,
    Fill,
    Index,
    MergeLora,
    Read,
    Reshape,
    Slice,
    Stack,
    Transpose,
    Unreplicate,
)
from orbaxkit.planning.regions import Spans, pull_back


def restrict(expr: Expr, spans: Spans) -> Expr:
    """The part of an expression between (start, stop) along each axis."""
    if spans == full(expr.shape):
        return expr
    match expr:
        case Read() | Fill():
            return _cut(expr, spans)
        case Stack(xs, axis):
            inner = spans[:axis] + spans[axis + 1 :]
            chosen = xs[slice(*spans[axis])]
            part = ex.stack([restrict(x, inner) for x in chosen or xs[:1]], axis)
            return part if chosen else ex.slice_(part, axis, 0, 0)
        case Concat(xs, axis):
            parts = list(pull_back(expr, spans)) or [(xs[0], (*spans[:axis], (0, 0), *spans[axis + 1 :]))]
            return ex.concat([restrict(x, inner) for x, inner in parts], axis)
        case Index() | Slice() | Unreplicate() | Transpose() | Cast() | Affine():
            ((x, inner),) = pull_back(expr, spans)
            return _again(expr, restrict(x, inner))
        case Reshape(x, _):
            ((x, inner),) = pull_back(expr, spans)
            is_exact = volume(inner) == volume(spans)
            return ex.reshape(restrict(x, inner), lengths(spans)) if is_exact else _cut(expr, spans)
        case MergeLora():
            return _restrict_lora(expr, spans)
    raise TypeError(f"{type(expr).__name__} is not an expression")


def _again(node: Expr, x: Expr) -> Expr:
    """The same operation on a part, of which nothing more is to be cut away."""
    match node:
        case Index(_, axis, _):
            return ex.index(x, axis, 0)
        case Slice():
            return x
        case _:
            return ex.rebuild(node, [x])


def _restrict_lora(node: Expr, spans: Spans) -> Expr:
    """Heads that are summed over stay whole until the sum is there."""
    wide = spans
    if node.form == "summed_heads":
        wide = (*spans[:-3], (0, node.shape[-3]), *spans[-2:])
    xs = [restrict(x, inner) for x, inner in pull_back(node, wide)]
    merged = ex.rebuild(node, xs)
    return _cut(merged, (*full(merged.shape)[:-3], spans[-3], *full(merged.shape)[-2:])) if wide != spans else merged


def _cut(expr: Expr, spans: Spans) -> Expr:
    for axis, (start, stop) in enumerate(spans):
        expr = ex.slice_(expr, axis, start, stop)
    return expr
