"""Evaluate expressions with jax: one node at a time, or a whole plan as one pure function."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from orbaxkit.errors import TransformError
from orbaxkit.planning.host import lora_delta, working_dtype
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
    reads_of,
)
from orbaxkit.planning.numbers import WIDE, is_checked_cast, is_exact_cast
from orbaxkit.planning.plan import Plan


def as_function(plan: Plan) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """See `Plan.as_function`."""
    exprs = {name: o.expr for name, o in plan.outputs.items() if o.expr.kind not in ("string", "empty")}
    _refuse_untraceable(exprs)
    wanted = {read.name: read for expr in exprs.values() for read in reads_of(expr)}

    def function(leaves: Mapping[str, Any]) -> dict[str, Any]:
        given = _checked(leaves, wanted.values())
        done: dict[int, Any] = {}
        results = fold(exprs.values(), lambda node, xs: step(node, xs, lambda read: given[read.name]), done)
        return dict(zip(exprs, results, strict=True))

    return function


def step(node: Expr, xs: tuple[Any, ...], read: Callable[[Read], Any]) -> Any:
    """One node from its children's jax arrays (typed PRNG keys are arrays of keys)."""
    import jax.numpy as jnp
    from jax import lax

    element, along = node.element, (slice(None),) * getattr(node, "axis", 0)
    match node:
        case Read():
            return read(node)
        case Fill(value, shape):
            return jnp.asarray(value.array if isinstance(value, Constant) else np.full(shape, value, element.dtype))
        case Index():
            return xs[0][(*along, node.i)]
        case Slice():
            return lax.slice_in_dim(xs[0], node.start, node.stop, axis=node.axis)
        case Stack():
            return jnp.stack(xs, node.axis)
        case Concat():
            return jnp.concatenate(xs, node.axis)
        case Transpose(_, perm):
            return jnp.transpose(xs[0], perm)
        case Reshape():
            return jnp.reshape(xs[0], node.shape)
        case Cast():
            return cast_traced(xs[0], node.to)
        case Affine():
            return _affine(xs[0], node)
        case MergeLora():
            return _merge_lora(node, *xs)
        case Unreplicate():
            return xs[0][(*along, 0)]
    raise TypeError(f"{type(node).__name__} is not an expression")


def cast_traced(x: Any, dtype: np.dtype) -> Any:
    """Cast; a barrier after rounding keeps compilers from carrying the unrounded value on.

    Values are not looked at: whoever casts into integers checks them first (`numbers.is_checked_cast`).
    """
    out = x.astype(dtype)
    return out if is_exact_cast(np.dtype(x.dtype), dtype) else _barrier(out)


def _barrier(x: Any) -> Any:
    from jax import lax

    return lax.optimization_barrier(x)


def _affine(x: Any, node: Expr) -> Any:
    wide = working_dtype(node.dtype)
    return _barrier((x.astype(wide) * wide.type(node.scale) + wide.type(node.shift)).astype(node.dtype))


def _merge_lora(node: Expr, w: Any, a: Any, b: Any) -> Any:
    import jax.numpy as jnp

    def matmul(a: Any, b: Any) -> Any:
        return jnp.matmul(a, b, precision="highest")

    wide = working_dtype(node.dtype)
    delta = lora_delta(matmul, node.form, a.astype(wide), b.astype(wide))
    return _barrier((w.astype(wide) + wide.type(node.scale) * delta).astype(node.dtype))


def _refuse_untraceable(exprs: Mapping[str, Expr]) -> None:
    """What a traced function cannot do: look at values, read files."""
    problems: dict[str, str] = {}
    for name, expr in exprs.items():

        def visit(node: Expr, _: tuple, name: str = name) -> None:
            problem = _untraceable(node)
            if problem:
                problems.setdefault(name, problem)

        fold([expr], visit)
    if problems:
        raise TransformError(
            "a function for jit cannot check values or read files",
            leaves=problems.items(),
            hint="drop these leaves from the plan, or restore it: ok.restore(path, ...) does both",
        )


def _untraceable(node: Expr) -> str | None:
    if isinstance(node, Cast) and is_checked_cast(node.x.dtype, node.to):
        return f"the cast from {node.x.dtype} to {node.to} checks that values fit"
    if isinstance(node, Unreplicate):
        return f"axis {node.axis} is checked to hold equal copies"
    if isinstance(node, Read) and node.source is not None:
        return f"is filled from {node.source.label}"
    return None


def _checked(leaves: Mapping[str, Any], reads: Iterable[Expr]) -> dict[str, Any]:
    """The arrays that the plan reads; missing ones and other shapes or dtypes are errors, nothing is cast."""
    import jax.numpy as jnp

    given, problems = {}, []
    for read in reads:
        if read.name not in leaves:
            problems.append((read.name, "is missing"))
            continue
        value = leaves[read.name]
        x = (
            value
            if hasattr(value, "dtype") and not isinstance(value, np.generic)
            else np.asarray(value, read.element.dtype)
        )
        problem = _mismatch(x, read.shape, read.element)
        if problem:
            problems.append((read.name, problem))
        else:
            given[read.name] = jnp.asarray(x)
    if problems:
        raise TransformError("the arrays are not those that the plan was made for", leaves=problems)
    return given


def _mismatch(x: Any, shape: tuple[int, ...], element: Element) -> str | None:
    import jax

    dtype = str(x.dtype)
    is_key = dtype.startswith("key<")
    if (
        tuple(x.shape) != shape
        or is_key != (element.kind == "key")
        or not (is_key or element.dtype is None or element.dtype == x.dtype)
    ):
        return (
            f"is {dtype}{list(x.shape)}, the plan has {element.dtype if element.kind != 'key' else 'keys'}{list(shape)}"
        )
    if dtype in WIDE and not jax.config.jax_enable_x64:
        return f"is {dtype}, and jax has 64-bit types switched off"
    return None
