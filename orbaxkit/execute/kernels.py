"""Evaluate expressions on devices, one jitted kernel per node.

A kernel is compiled once per (operation, shape, dtype, sharding): positions along an axis are traced, so that all
layers share one compilation, and small layers leave an array many at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from orbaxkit.execute.placing import in_device_memory, on_device, place
from orbaxkit.planning import traced
from orbaxkit.planning.expressions import rebuild
from orbaxkit.planning.nodes import Cast, Constant, Expr, Fill, Index, Read, Slice, Unreplicate, fold
from orbaxkit.planning.numbers import is_checked_cast

# Layers smaller than this leave an array together, as many as make up so many bytes.
BATCH_BYTES = 1 << 20
BATCH_COUNT = 4  # more at a time take XLA longer to compile than they save


def must_see_values(expr: Expr) -> bool:
    """Whether some node looks at values (equal copies, integers that must fit), which is done on the host."""
    looks: list[bool] = []
    fold([expr], lambda node, _: looks.append(_looks(node)))
    return any(looks)


def _looks(node: Expr) -> bool:
    return isinstance(node, Unreplicate) or (isinstance(node, Cast) and is_checked_cast(node.x.dtype, node.to))


def evaluate(
    exprs: Sequence[Expr], given: Mapping[int, jax.Array], shardings: Sequence[Sharding | None]
) -> list[jax.Array]:
    """The values of expressions from those of some of their nodes, by `id`.

    `shardings` are those of the results; None leaves a result where jax computes it.
    """
    wanted = {id(expr): sharding for expr, sharding in zip(exprs, shardings, strict=True)}
    done: dict[int, Any] = {key: _on_auto_mesh(array) for key, array in given.items()}
    layers = _Layers(exprs, wanted, done)

    def visit(node: Expr, xs: tuple[jax.Array, ...]) -> jax.Array:
        if isinstance(node, Index):
            return layers.take(node, xs[0])
        if isinstance(node, Fill) and isinstance(node.value, Constant):  # no part of a kernel, which would keep it
            return _constant(node.value.array, _auto(wanted.get(id(node))))
        return _run(node, xs, _auto(wanted.get(id(node))))

    with _auto_context():
        results = fold(exprs, visit, done)
    like = _explicit_mesh(given.values())
    return [_on_mesh(result, sharding or like) for result, sharding in zip(results, shardings, strict=True)]


class _Layers:
    """The positions that are taken from each array, so that neighbours leave it together."""

    def __init__(self, exprs: Iterable[Expr], wanted: Mapping[int, Sharding | None], done: Mapping[int, Any]):
        self._wanted = wanted
        self._positions: dict[tuple[int, int], dict[int, int]] = {}
        self._taken: dict[tuple[int, int], dict[int, jax.Array]] = {}

        def visit(node: Expr, _: tuple) -> None:
            if isinstance(node, Index):
                self._positions.setdefault((id(node.x), node.axis), {})[node.i] = id(node)

        fold(exprs, visit, dict.fromkeys(done))

    def take(self, node: Index, x: jax.Array) -> jax.Array:
        """One position; takes its neighbours along where layers are small."""
        key = id(node.x), node.axis
        taken = self._taken.setdefault(key, {})
        if node.i not in taken:
            taken |= self._take_some(x, node.axis, node.i, self._positions[key])
        return taken.pop(node.i)

    def _take_some(self, x: jax.Array, axis: int, i: int, positions: Mapping[int, int]) -> dict[int, jax.Array]:
        sharding = self._wanted.get(positions[i])
        size = x.shape[axis]
        count = min(BATCH_COUNT, size, max(1, BATCH_BYTES * size // max(x.nbytes, 1))) if x.dtype.itemsize else 1
        first = min(i, size - count)
        together = range(first, first + count)
        if any(k not in positions or self._wanted.get(positions[k]) != sharding for k in together if k >= i):
            first, together = i, range(i, i + 1)
        layers = _take(axis, len(together), _auto(sharding))(first, x)
        return {k: layer for k, layer in zip(together, layers, strict=True) if k >= i}


@lru_cache(maxsize=4096)
def _take(axis: int, count: int, sharding: Sharding | None) -> Any:
    """`count` neighbouring positions of an axis, from a traced first one."""

    def take(first: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [lax.dynamic_index_in_dim(x, first + k, axis, keepdims=False) for k in range(count)]

    return jax.jit(take, out_shardings=sharding)


def _run(node: Expr, xs: tuple[jax.Array, ...], sharding: Sharding | None) -> jax.Array:
    leaves = [Read(str(k), x.shape, x.element) for k, x in enumerate(node.children)]
    if isinstance(node, Slice):
        return _slice(node.axis, node.stop - node.start, sharding)(node.start, *xs)
    return _kernel(rebuild(node, leaves), sharding)(*xs)


@lru_cache(maxsize=4096)
def _slice(axis: int, size: int, sharding: Sharding | None) -> Any:
    return jax.jit(lambda start, x: lax.dynamic_slice_in_dim(x, start, size, axis), out_shardings=sharding)


@lru_cache(maxsize=4096)
def _kernel(node: Expr, sharding: Sharding | None) -> Any:
    """A node over placeholders as a jitted function of its children."""
    return jax.jit(lambda *xs: traced.step(node, xs, lambda leaf: xs[int(leaf.name)]), out_shardings=sharding)


def _constant(array: Any, sharding: Sharding | None) -> jax.Array:
    """A given array where it is wanted; one that lies on local devices alone is cut up by each process for itself."""
    is_local = getattr(array, "is_fully_addressable", True)
    if sharding is None or sharding.is_fully_addressable or not is_local:
        return jax.device_put(array, sharding)
    return place(array, sharding)


def _auto(sharding: Sharding | None) -> Sharding | None:
    """The same placement in device memory, on a mesh whose axes are all Auto: kernels then need no rules of their own.

    What is wanted in another kind of memory is moved there when it is done.
    """
    if sharding is None:
        return None
    sharding = in_device_memory(sharding)
    if not isinstance(sharding, NamedSharding) or all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return sharding
    return NamedSharding(Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)


def _auto_context() -> AbstractContextManager[Any]:
    """The user's own `jax.set_mesh` context with all axes Auto, like the arrays that kernels get."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or all(kind == AxisType.Auto for kind in mesh.axis_types):
        return nullcontext()
    return jax.set_mesh(Mesh(mesh.devices, mesh.axis_names))


def _on_auto_mesh(x: jax.Array) -> jax.Array:
    return _relabelled(x, _auto(x.sharding) or x.sharding)


def _explicit_mesh(arrays: Iterable[jax.Array]) -> Any:
    """The mesh with explicit axes that arrays came on, which results without a sharding of their own go back to."""
    for x in arrays:
        if isinstance(x.sharding, NamedSharding) and AxisType.Explicit in x.sharding.mesh.axis_types:
            return x.sharding.mesh
    return None


def _on_mesh(x: jax.Array, sharding: Sharding | Mesh | None) -> jax.Array:
    if isinstance(sharding, Mesh):
        sharding = NamedSharding(sharding, x.sharding.spec) if isinstance(x.sharding, NamedSharding) else None
    return x if sharding is None else _relabelled(x, sharding)


def _relabelled(x: jax.Array, sharding: Sharding) -> jax.Array:
    """The same shards under another name for the same placement, or in another kind of memory."""
    if x.sharding == sharding:
        return x
    if not in_device_memory(x.sharding).is_equivalent_to(in_device_memory(sharding), x.ndim):
        return jax.device_put(x, sharding)
    shards = [shard.data for shard in x.addressable_shards]
    if x.sharding.memory_kind != sharding.memory_kind:
        shards = [jax.device_put(one.data, on_device(one.device, sharding)) for one in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)
