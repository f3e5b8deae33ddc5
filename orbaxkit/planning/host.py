"""Evaluate expressions with numpy: the reference that every other executor must match bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np

from orbaxkit.errors import TransformError
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Constant,
    Element,
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
from orbaxkit.planning.numbers import category, int_range, is_checked_cast


def evaluate(expr: Expr, read: Callable[[Read], np.ndarray]) -> np.ndarray:
    """The value of an expression; `read` gives a leaf's stored array (PRNG keys: with the axis of their words)."""
    return fold([expr], lambda node, xs: step(node, xs, read))[0]


def step(node: Expr, xs: tuple[np.ndarray, ...], read: Callable[[Read], np.ndarray]) -> np.ndarray:
    """One node from its children's values. Views where numpy gives views."""
    element: Element = node.element
    along: tuple[Any, ...] = (slice(None),) * getattr(node, "axis", 0)
    match node:
        case Read():
            return np.asarray(read(node))
        case Fill(value, shape):
            return _constant(value.array) if isinstance(value, Constant) else np.full(shape, value, element.dtype)
        case Index():
            return xs[0][(*along, node.i, ...)]  # the ellipsis: an array of no axes stays an array
        case Slice():
            return xs[0][(*along, slice(node.start, node.stop))]
        case Stack():
            return np.stack(xs, node.axis)
        case Concat():
            return np.concatenate(xs, node.axis)
        case Transpose(_, perm):
            return xs[0].transpose((*perm, *range(len(perm), xs[0].ndim)))
        case Reshape():
            return xs[0].reshape(node.shape + element.words)
        case Cast():
            return cast_host(xs[0], node.to)
        case Affine():
            return np.asarray(_affine(xs[0], node.scale, node.shift))
        case MergeLora():
            return _merge_lora(node, *xs)
        case Unreplicate():
            return _the_copy(node, xs[0])
    raise TypeError(f"{type(node).__name__} is not an expression")


def _constant(array: Any) -> np.ndarray:
    if not str(array.dtype).startswith("key<"):
        return np.asarray(array)
    import jax

    return np.asarray(jax.random.key_data(array))


def cast_host(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast as `numpy.astype` does; into integers, values that do not fit are refused.

    Raises TransformError: NaN, infinities or values out of range for an integer dtype.
    """
    if is_checked_cast(x.dtype, dtype):
        check_values(x, dtype)
    try:
        return x.astype(dtype)
    except TypeError:  # ml_dtypes lacks casts between some small types; float32 holds all of those exactly
        return x.astype(np.float32).astype(dtype)


def check_values(x: np.ndarray, dtype: np.dtype) -> None:
    """Refuse values that an integer or boolean dtype cannot hold. Floats are cut towards zero, as `astype` does."""
    low, high = int_range(dtype)
    x = np.atleast_1d(x)
    bad = ~_fits(x, low, high, is_whole=category(dtype) == "bool")
    count = int(bad.sum())
    if count:
        first = x[bad].flat[0]
        raise TransformError(
            f"{count:,} of {x.size:,} values do not fit in {dtype.name}, the first is {first}",
            hint="cast to a dtype that holds them",
        )


def _fits(x: np.ndarray, low: int, high: int, is_whole: bool) -> np.ndarray:
    if category(x.dtype) in ("int", "bool"):
        wide = x if x.dtype.name == "uint64" else x.astype(np.int64)
        low, high = max(low, int(np.iinfo(wide.dtype).min)), min(high, int(np.iinfo(wide.dtype).max))
        return (wide >= low) & (wide <= high)
    wide = x.astype(np.float64)
    cut = np.trunc(wide)
    fits = (cut >= low) & (cut <= high if high < 2**53 else cut < float(high + 1))
    return fits & (cut == wide) if is_whole else fits


def _affine(x: np.ndarray, scale: float, shift: float) -> np.ndarray:
    wide = working_dtype(x.dtype)
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(wide) * wide.type(scale) + wide.type(shift)).astype(x.dtype)


def working_dtype(dtype: np.dtype) -> np.dtype:
    """What sums and products are computed in: float32, or wider where the leaf is."""
    return dtype if dtype.name in ("float64", "complex64", "complex128") else np.dtype(np.float32)


def _merge_lora(node: MergeLora, w: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = working_dtype(w.dtype)
    with np.errstate(all="ignore"):
        delta = lora_delta(np.matmul, node.form, a.astype(wide), b.astype(wide))
        return (w.astype(wide) + wide.type(node.scale) * delta).astype(w.dtype)


def lora_delta(matmul: Callable[[Any, Any], Any], form: str, a: Any, b: Any) -> Any:
    """`dW` of a LoRA pair: `a @ b`, for `summed_heads` with `b` summed over its heads first."""
    if form == "summed_heads":
        b = b.sum(-3, keepdims=True)
    return matmul(a, b)


def _the_copy(node: Unreplicate, x: np.ndarray) -> np.ndarray:
    copies = np.moveaxis(x, node.axis, 0)
    first = copies[0, ...]
    bits = np.ascontiguousarray(first).tobytes()
    for k, copy in enumerate(copies):
        if np.ascontiguousarray(copy).tobytes() != bits:
            raise TransformError(
                f"copy {k} along axis {node.axis} differs from copy 0",
                hint="these are not replicas: index the one you want, or keep the axis",
            )
    return first
