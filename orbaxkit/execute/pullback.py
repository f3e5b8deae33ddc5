"""From the sharding of an output to those of what it is computed from."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from orbaxkit.execute.placing import in_device_memory, pieces_along
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Expr,
    Index,
    MergeLora,
    Reshape,
    Slice,
    Stack,
    Transpose,
    Unreplicate,
)
from orbaxkit.planning.regions import axis_groups

Spec = tuple[Any, ...]


def pull_back(node: Expr, sharding: Sharding) -> list[Sharding]:
    """A sharding for each child, in device memory, under which the node's kernel moves nothing between devices."""
    sharding = in_device_memory(sharding)
    if not isinstance(sharding, NamedSharding):
        return [sharding for _ in node.children]
    spec = (*sharding.spec, *(None,) * (len(node.shape) - len(sharding.spec)))
    return [sharding.update(spec=PartitionSpec(*inner)) for inner in _specs(node, spec, sharding.mesh)]


def _specs(node: Expr, spec: Spec, mesh: Any) -> list[Spec]:
    match node:
        case Cast() | Affine():
            return [spec]
        case Transpose(_, perm):
            return [tuple(spec[perm.index(axis)] for axis in range(len(perm)))]
        case Index(_, axis) | Unreplicate(_, axis):
            return [(*spec[:axis], None, *spec[axis:])]
        case Slice(_, axis):
            return [(*spec[:axis], None, *spec[axis + 1 :])]
        case Stack(xs, axis):
            return [spec[:axis] + spec[axis + 1 :]] * len(xs)
        case Concat(xs, axis):
            return [(*spec[:axis], None, *spec[axis + 1 :])] * len(xs)
        case MergeLora():
            heads = spec[-3:-2] if node.form == "product" else (None,) * len(spec[-3:-2])
            return [spec, (*spec[:-1], None), (*spec[:-3], *heads, None, spec[-1])]
        case Reshape(x, shape):
            return [reshaped(x.shape, shape, spec, mesh.shape)]
        case _:
            return [(None,) * len(x.shape) for x in node.children]


def reshaped(source: tuple[int, ...], shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """The spec of `source` from that of its reshape: of axes that mix, the first keeps its pieces where they divide it.

    The others are whole on every device.
    """
    inner: list[Any] = [None] * len(source)
    if 0 in source:
        return tuple(inner)
    for ours, theirs in axis_groups(source, shape):
        first = next((k for k in ours if source[k] != 1), None)
        outer = next((k for k in theirs if shape[k] != 1), None)
        if first is not None and outer is not None and source[first] % pieces_along(sizes, spec[outer]) == 0:
            inner[first] = spec[outer]
    return tuple(inner)
