"""Constructors of expressions: each checks and simplifies, so that undoing an operation gives back what was there.

The rules remove pairs that cancel (a Stack of every Index of x is x, an Index of a Stack is its element, Transpose of
Transpose, …); they never move an operation through another one, so nothing is copied and nothing blows up.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from orbaxkit.arguments import one_of
from orbaxkit.errors import TransformError
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Constant,
    Element,
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
    fold,
)
from orbaxkit.planning.numbers import check_cast, dtype_of, is_exact_cast, same_dtype
from orbaxkit.specs import Kind, LeafSpec

LORA_FORMS = ("product", "summed_heads")


def read(name: str, spec: LeafSpec, source: Foreign | None = None) -> Read:
    """A whole leaf."""
    return Read(name, spec.shape, Element.of(spec), source)


def fill(value: Any, shape: Sequence[int] | None = None, element: Element | None = None) -> Fill:
    """A number in a shape (by itself a scalar), a string, or an array as it is."""
    if isinstance(value, str):
        return Fill(value, (), Element(None, "string"))
    if isinstance(value, (bool, int, float, complex)):
        return Fill(value, tuple(shape or ()), element or Element(np.dtype(type(value)), "scalar"))
    kind: Kind = "numpy" if isinstance(value, (np.ndarray, np.generic)) else "array"
    return Fill(Constant(value), tuple(value.shape), element or Element(np.dtype(value.dtype), kind))


def index(x: Expr, axis: int, i: int) -> Expr:
    """`x[..., i, ...]`: one position of an axis."""
    axis = _axis(x, axis)
    if not -x.shape[axis] <= i < x.shape[axis]:
        raise TransformError(f"position {i} is not in axis {axis} of {describe(x)}")
    i %= x.shape[axis]
    if isinstance(x, Stack) and x.axis == axis:
        return x.xs[i]
    if isinstance(x, Slice) and x.axis == axis:
        return index(x.x, axis, x.start + i)
    if isinstance(x, Concat) and x.axis == axis:
        part, offset = _part_at(x, i)
        return index(part, axis, i - offset)
    if isinstance(x, Transpose) and _only_moves(x.perm, axis):
        return index(x.x, x.perm[axis], i)
    if _is_number(x):
        return Fill(x.value, x.shape[:axis] + x.shape[axis + 1 :], x.element)
    return Index(x, axis, i)


def slice_(x: Expr, axis: int, start: int, stop: int) -> Expr:
    """Positions `start` to `stop` of an axis."""
    axis = _axis(x, axis)
    if not 0 <= start <= stop <= x.shape[axis]:
        raise TransformError(f"positions {start}:{stop} are not in axis {axis} of {describe(x)}")
    if (start, stop) == (0, x.shape[axis]):
        return x
    if isinstance(x, Slice) and x.axis == axis:
        return slice_(x.x, axis, x.start + start, x.start + stop)
    if isinstance(x, Stack) and x.axis == axis and start < stop:
        return stack(x.xs[start:stop], axis)
    if isinstance(x, Concat) and x.axis == axis and start < stop:
        return _slice_concat(x, axis, start, stop)
    if _is_number(x):
        return Fill(x.value, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.element)
    return Slice(x, axis, start, stop)


def stack(xs: Iterable[Expr], axis: int) -> Expr:
    """Arrays of one shape along a new axis."""
    xs = tuple(xs)
    _check_joinable(xs, "stacked")
    ndim = len(xs[0].shape) + 1
    if not -ndim <= axis < ndim:
        raise TransformError(f"there is no axis {axis} in a stack of {describe(xs[0])}")
    axis %= ndim
    odd = [x for x in xs if x.shape != xs[0].shape]
    if odd:
        raise TransformError(f"shapes differ: {describe(xs[0])} and {describe(odd[0])}")
    return _restacked(xs, axis) or Stack(xs, axis)


def concat(xs: Iterable[Expr], axis: int) -> Expr:
    """Arrays joined along an axis they have."""
    xs = tuple(xs)
    _check_joinable(xs, "joined")
    axis = _axis(xs[0], axis)
    ndim, rest = len(xs[0].shape), _without(xs[0].shape, axis)
    odd = [x for x in xs if len(x.shape) != ndim or _without(x.shape, axis) != rest]
    if odd:
        raise TransformError(f"shapes differ besides axis {axis}: {describe(xs[0])} and {describe(odd[0])}")
    parts = _merged([p for x in xs for p in (x.xs if isinstance(x, Concat) and x.axis == axis else (x,))], axis)
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), axis)


def transpose(x: Expr, perm: Sequence[int] | None = None) -> Expr:
    """Axis `k` of the result is axis `perm[k]` of `x`; without `perm` the axes are reversed."""
    _check_layout(x, "transposed")
    ndim = len(x.shape)
    perm = tuple(reversed(range(ndim))) if perm is None else tuple(perm)
    if sorted(p % ndim if -ndim <= p < ndim else p for p in perm) != list(range(ndim)):
        raise TransformError(f"{perm} is not an order of the {ndim} axes of {describe(x)}")
    perm = tuple(p % ndim for p in perm)
    if isinstance(x, Transpose):
        x, perm = x.x, tuple(x.perm[p] for p in perm)
    if perm == tuple(range(ndim)):
        return x
    if _is_number(x):
        return Fill(x.value, tuple(x.shape[p] for p in perm), x.element)
    return Transpose(x, perm)


def reshape(x: Expr, shape: Sequence[int]) -> Expr:
    """The same elements in C order in another shape; one size may be -1."""
    _check_layout(x, "reshaped")
    shape = _complete_shape(x, tuple(shape))
    while isinstance(x, Reshape):
        x = x.x
    if shape == x.shape:
        return x
    if isinstance(x, Index) and shape == (*x.x.shape[: x.axis], 1, *x.x.shape[x.axis + 1 :]):
        return slice_(x.x, x.axis, x.i, x.i + 1)
    if _is_number(x):
        return Fill(x.value, shape, x.element)
    return Reshape(x, shape)


def cast(x: Expr, to: Any) -> Expr:
    """The same values in another dtype. Refused for strings, empty nodes and PRNG keys, and from complex to real."""
    dtype = dtype_of(to)
    check_cast(x.element, dtype)
    if same_dtype(x.dtype, dtype):
        return x
    if isinstance(x, Cast) and is_exact_cast(x.x.dtype, x.to):
        return cast(x.x, dtype)
    return Cast(x, dtype)


def affine(x: Expr, scale: int | float = 1.0, shift: int | float = 0.0) -> Expr:
    """`x * scale + shift`, for floating-point leaves."""
    if (
        not x.element.is_numeric
        or x.dtype is None
        or x.dtype.kind in "biu"
        or x.dtype.name.lstrip("u").startswith("int")
    ):
        raise TransformError(f"{describe(x)} is not floating-point and cannot be scaled or shifted")
    if not (math.isfinite(scale) and math.isfinite(shift)):
        raise TransformError(f"scale {scale} and shift {shift} must be finite")
    return x if (scale, shift) == (1, 0) else Affine(x, float(scale), float(shift))


def merge_lora(w: Expr, a: Expr, b: Expr, scale: int | float = 1.0, form: str = "product") -> Expr:
    """Add a low-rank update to a weight.

    `product`: `dW = a @ b` over the last two axes, per leading index. `summed_heads` (openpi's attn_vec_einsum, whose
    LoRA sums over heads twice): `dW[n, h, d] = sum_l a[n, h, l] * sum_m b[m, l, d]`, with any leading axes.
    """
    one_of("form", form, LORA_FORMS)
    least = 2 if form == "product" else 3
    if len(w.shape) < least or not len(w.shape) == len(a.shape) == len(b.shape):
        raise TransformError(f"w {describe(w)}, a {describe(a)} and b {describe(b)} do not fit the form {form!r}")
    fits = a.shape[:-1] == w.shape[:-1] and (*b.shape[:-2], b.shape[-1]) == (*w.shape[:-2], w.shape[-1])
    if not fits or a.shape[-1] != b.shape[-2]:
        raise TransformError(f"w {describe(w)}, a {describe(a)} and b {describe(b)} do not fit the form {form!r}")
    for x in (w, a, b):
        affine(x)
    return MergeLora(w, a, b, float(scale), form)


def unreplicate(x: Expr, axis: int = 0) -> Expr:
    """One of the equal copies along an axis; that they are equal is checked when data is read."""
    axis = _axis(x, axis)
    if x.shape[axis] == 0:
        raise TransformError(f"axis {axis} of {describe(x)} holds no copy")
    return index(x, axis, 0) if x.shape[axis] == 1 else Unreplicate(x, axis)


def rebuild(node: Expr, xs: Sequence[Expr]) -> Expr:
    """The same operation on other expressions, simplified anew."""
    match node:
        case Read() | Fill():
            return node
        case Index():
            return index(xs[0], node.axis, node.i)
        case Slice():
            return slice_(xs[0], node.axis, node.start, node.stop)
        case Stack():
            return stack(xs, node.axis)
        case Concat():
            return concat(xs, node.axis)
        case Transpose():
            return transpose(xs[0], node.perm)
        case Reshape():
            return reshape(xs[0], node.shape)
        case Cast():
            return cast(xs[0], node.to)
        case Affine():
            return affine(xs[0], node.scale, node.shift)
        case MergeLora():
            return merge_lora(xs[0], xs[1], xs[2], node.scale, node.form)
        case Unreplicate():
            return unreplicate(xs[0], node.axis)
    raise TypeError(f"{type(node).__name__} is not an expression")


def substitute(roots: Iterable[Expr], replacement: Any) -> list[Expr]:
    """Replace reads: `replacement(read)` is an expression, or the same read."""

    def visit(node: Expr, xs: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Read):
            return replacement(node)
        same = all(new is old for new, old in zip(xs, node.children, strict=True))
        return node if same else rebuild(node, xs)

    return fold(roots, visit)


def describe(x: Expr) -> str:
    """`float32[2, 3]`, for messages."""
    spec = spec_of(x)
    return str(spec)


def spec_of(x: Expr) -> LeafSpec:
    """The shape, dtype and kind of an expression."""
    e = x.element
    words = x.shape + e.words if e.words else None
    return LeafSpec(x.shape, e.dtype, e.kind, stored_shape=words, key_impl=e.key_impl)


def _axis(x: Expr, axis: int) -> int:
    _check_layout(x, "cut or joined")
    if not -len(x.shape) <= axis < len(x.shape):
        raise TransformError(f"{describe(x)} has no axis {axis}")
    return axis % len(x.shape)


def _check_layout(x: Expr, what: str) -> None:
    if not x.element.has_layout:
        raise TransformError(f"{describe(x)} is not an array and cannot be {what}")


def _check_joinable(xs: Sequence[Expr], what: str) -> None:
    if not xs:
        raise TransformError(f"nothing to be {what}")
    for x in xs:
        _check_layout(x, what)
        if not same_dtype(x.dtype, xs[0].dtype) or x.element.key_impl != xs[0].element.key_impl:
            raise TransformError(f"dtypes differ: {describe(xs[0])} and {describe(x)}", hint="cast them first")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _only_moves(perm: tuple[int, ...], axis: int) -> bool:
    """Whether the other axes stay in order once this one is gone."""
    rest = _without(perm, axis)
    return list(rest) == sorted(rest)


def _is_number(x: Expr) -> bool:
    return isinstance(x, Fill) and not isinstance(x.value, Constant)


def _restacked(xs: tuple[Expr, ...], axis: int) -> Expr | None:
    """A stack of neighbouring positions of one array is a slice of it; copies of one constant are a larger one."""
    first = xs[0]
    if _is_number(first) and all(x == first for x in xs):
        return Fill(first.value, (*first.shape[:axis], len(xs), *first.shape[axis:]), first.element)
    if isinstance(first, Unreplicate) and first.x.shape[first.axis] == len(xs) and all(x == first for x in xs):
        return _moved(first.x, first.axis, axis)
    if not isinstance(first, Index):
        return None
    for k, x in enumerate(xs):
        if not isinstance(x, Index) or (x.axis, x.i) != (first.axis, first.i + k) or x.x != first.x:
            return None
    return _moved(slice_(first.x, first.axis, first.i, first.i + len(xs)), first.axis, axis)


def _moved(x: Expr, source: int, target: int) -> Expr:
    order = [k for k in range(len(x.shape)) if k != source]
    order.insert(target, source)
    return transpose(x, order)


def _merged(parts: list[Expr], axis: int) -> list[Expr]:
    """Neighbouring slices of one array become one; empty slices go."""
    out: list[Expr] = []
    if not any(part.shape[axis] for part in parts):
        return parts[:1]
    parts = [part for part in parts if not (isinstance(part, Slice) and part.axis == axis and part.start == part.stop)]
    for part in parts:
        last = out[-1] if out else None
        if (
            isinstance(last, Slice)
            and isinstance(part, Slice)
            and last.axis == part.axis == axis
            and last.stop == part.start
            and last.x == part.x
        ):
            out[-1] = slice_(part.x, axis, last.start, part.stop)
        else:
            out.append(part)
    return out


def _part_at(x: Concat, i: int) -> tuple[Expr, int]:
    offset = 0
    for part in x.xs:
        if i < offset + part.shape[x.axis]:
            return part, offset
        offset += part.shape[x.axis]
    raise IndexError(i)


def _slice_concat(x: Concat, axis: int, start: int, stop: int) -> Expr:
    parts, offset = [], 0
    for part in x.xs:
        size = part.shape[axis]
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            parts.append(slice_(part, axis, low, high))
        offset += size
    return concat(parts, axis)


def _complete_shape(x: Expr, shape: tuple[int, ...]) -> tuple[int, ...]:
    size = math.prod(x.shape)
    if shape.count(-1) == 1:
        known = math.prod(s for s in shape if s != -1)
        if known and size % known == 0:
            shape = tuple(size // known if s == -1 else s for s in shape)
    if any(s < 0 for s in shape) or math.prod(shape) != size:
        raise TransformError(f"{describe(x)} cannot be reshaped to {list(shape)}")
    return shape
