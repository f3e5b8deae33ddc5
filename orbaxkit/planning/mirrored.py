"""One expression over params, repeated over what mirrors them: moments of their shapes, and of other shapes."""

from collections.abc import Mapping, Sequence

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
    fold,
)

Shape = tuple[int, ...]
# By param: its shape, and the mirror's leaf.
Sources = Mapping[str, tuple[Shape, Expr]]


class Refusal(Exception):
    """Why a mirror cannot follow."""


def mirrored_expression(plain: Expr, sources: Sources, layout: str) -> Expr:
    """What an expression (`without_values`) makes of params, made of their mirrors.

    Layouts are those of `states.StateField`: `params` repeats every step; `memory` repeats it one axis further back; of
    factored and other moments only what is provably right is done. Raises Refusal with the reason for anything else.
    """
    if isinstance(plain, Read):
        return sources[plain.name][1]
    if layout == "per axis":
        raise Refusal("one value for each position of each axis cannot be cut, joined or moved")
    if layout == "params" or all(found.shape == shape for shape, found in sources.values()):
        return fold([plain], lambda node, xs: _repeat(node, xs, sources))[0]
    if layout == "memory":
        return fold([plain], lambda node, xs: _shifted(node, xs, sources))[0]
    if layout == "factored":
        return _factored(plain, sources)
    raise Refusal("one value for each param cannot be cut or joined")


def without_values(expr: Expr, role: str, initial: str) -> Expr:
    """The layout alone: moments are not cast with their params; a shift leaves them, a scale would change them.

    Beside constants, which are new params, there are moments where these begin at zero.

    Raises Refusal for what has no moments.
    """

    def visit(node: Expr, xs: tuple[Expr, ...]) -> Expr:
        if isinstance(node, MergeLora):
            raise Refusal("a merged weight has no moments of its own")
        if isinstance(node, Fill):
            if initial != "zero":
                raise Refusal("joined with a constant, for which there are no moments")
            return ex.fill(0, node.shape, node.element)
        if isinstance(node, Cast):
            return xs[0]
        if isinstance(node, Affine) and role != "params-like":
            if node.scale != 1:
                raise Refusal(f"a param scaled by {node.scale:g} has other moments")
            return xs[0]
        is_same = all(x is child for x, child in zip(xs, node.children, strict=True))
        return node if is_same else ex.rebuild(node, xs)

    return fold([expr], visit)[0]


def _repeat(node: Expr, xs: Sequence[Expr], sources: Sources) -> Expr:
    if isinstance(node, Read):
        shape, leaf = sources[node.name]
        if leaf.shape != shape:
            raise Refusal(f"has the shape {list(leaf.shape)}, its param {list(shape)}")
        return leaf
    if isinstance(node, Fill):
        return ex.fill(0, node.shape, next(iter(sources.values()))[1].element)
    return ex.rebuild(node, xs)


def _shifted(node: Expr, xs: Sequence[Expr], sources: Sources) -> Expr:
    """The same step behind one more axis in front."""
    match node:
        case Read():
            shape, leaf = sources[node.name]
            if leaf.shape[1:] != shape:
                raise Refusal(f"has the shape {list(leaf.shape)}, its param {list(shape)}")
            return leaf
        case Index():
            return ex.index(xs[0], node.axis + 1, node.i)
        case Slice():
            return ex.slice_(xs[0], node.axis + 1, node.start, node.stop)
        case Stack():
            return ex.stack(xs, node.axis + 1)
        case Concat():
            return ex.concat(xs, node.axis + 1)
        case Transpose():
            return ex.transpose(xs[0], (0, *(p + 1 for p in node.perm)))
        case Reshape():
            return ex.reshape(xs[0], (xs[0].shape[0], *node.shape))
        case Unreplicate():
            return ex.unreplicate(xs[0], node.axis + 1)
    raise Refusal(f"{type(node).__name__} of a memory of past values")


def _factored(expr: Expr, sources: Sources) -> Expr:
    """Adafactor's row and column means: a layer axis that is not factored can be cut, and layers stacked along one.

    They average over the two largest axes: `v_row` lacks the largest, `v_col` the second largest, and a field that is
    not used has the shape (1,).
    """
    if isinstance(expr, Index) and isinstance(expr.x, Read):
        shape, leaf = sources[expr.x.name]
        lacking = _lacking_axis(shape, leaf.shape)
        if lacking is None:
            return leaf
        _refuse_factored(shape, expr.axis)
        return ex.index(leaf, expr.axis - (lacking < expr.axis), expr.i)
    stacked: Shape = expr.shape
    if isinstance(expr, Stack) and all(isinstance(x, Read) for x in expr.xs):
        pairs = [sources[x.name] for x in expr.xs]
        lacking = _lacking_axis(pairs[0][0], pairs[0][1].shape)
        if lacking is None and _is_small(stacked):
            return pairs[0][1]
        _refuse_factored(stacked, expr.axis)
        if lacking is None:
            return pairs[0][1]
        behind = lacking + (expr.axis <= lacking)
        return ex.stack([leaf for _, leaf in pairs], expr.axis - (behind < expr.axis))
    raise Refusal("a factored moment is only cut into layers or stacked of them; it can be made anew")


def _lacking_axis(shape: Shape, reduced: Shape) -> int | None:
    """The axis that a mean lacks; None for a field that is not used."""
    if reduced == (1,):
        return None
    for axis in reversed(_largest(shape)):
        if shape[:axis] + shape[axis + 1 :] == reduced:
            return axis
    raise Refusal(f"the shape {list(reduced)} is no mean over one of the two largest axes of {list(shape)}")


def _is_small(shape: Shape) -> bool:
    """Whether optax, by default, factors no moment of this shape."""
    return len(shape) < 2 or shape[_largest(shape)[0]] < 128


def _largest(shape: Shape) -> tuple[int, ...]:
    """The second largest axis and the largest, as optax orders them."""
    order = sorted(range(len(shape)), key=shape.__getitem__)
    return tuple(order[-2:])


def _refuse_factored(shape: Shape, axis: int) -> None:
    if axis in _largest(shape):
        raise Refusal(f"is factored over the layer axis {axis} of {list(shape)}: it can only be made anew")
