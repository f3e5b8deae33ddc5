"""From the sharding of an output to those of what it is computed from."""

from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from orbaxkit.planning.nodes import Affine, Cast, Concat, Expr, Index, MergeLora, Slice, Stack, Transpose, Unreplicate

Spec = tuple[object, ...]


def pull_back(node: Expr, sharding: Sharding) -> list[Sharding]:
    """A sharding for each child under which the node's kernel moves the least between devices."""
    if isinstance(sharding, SingleDeviceSharding) or not isinstance(sharding, NamedSharding):
        return [sharding for _ in node.children]
    spec = (*sharding.spec, *(None,) * (len(node.shape) - len(sharding.spec)))
    return [sharding.update(spec=PartitionSpec(*inner)) for inner in _specs(node, spec)]


def _specs(node: Expr, spec: Spec) -> list[Spec]:
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
        case _:  # a reshape may mix axes: whole on every device
            return [(None,) * len(x.shape) for x in node.children]
