"""The shardings that leaves were saved under, on the mesh that is present."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from orbaxkit.errors import TargetError
from orbaxkit.execute.placing import default_sharding, sharding_problem
from orbaxkit.execute.pullback import reshaped
from orbaxkit.planning import Expr, Plan
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
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
from orbaxkit.specs import SavedSharding


def saved_shardings(plan: Plan, names: Iterable[str]) -> dict[str, Sharding]:
    """Each output as its source was saved: the axes that transforms leave keep their names.

    The mesh is that of `jax.set_mesh`, else one of all devices in the shape that was saved. What was saved on one
    device, or nobody knows how, lies whole on every device of the mesh; on the default device where there is no mesh.

    Raises TargetError: leaves whose sharding does not fit the mesh, all of them.
    """
    names = list(names)
    found = fold([plan.outputs[name].expr for name in names], lambda node, xs: _carried(plan, node, xs))
    present = _Present()
    shardings: dict[str, Sharding] = {}
    problems: list[tuple[str, str]] = []
    for name, saved in zip(names, found, strict=True):
        if saved is not None and saved.axis_names:
            problem, sharding = present.find(plan.outputs[name].expr.shape, saved)
            problems += [(name, f"{plan.specs[name]} saved as {saved}: {problem}")] if problem else []
            shardings |= {} if sharding is None else {name: sharding}
    if problems:
        raise _does_not_fit(problems, found)
    return {name: shardings.get(name) or present.whole() for name in names}


@dataclass
class _Present:
    """The meshes that shardings are made on."""

    context: Mesh = field(default_factory=jax.sharding.get_mesh)
    made: dict[tuple[Any, Any], Mesh] = field(default_factory=dict)

    def find(self, shape: tuple[int, ...], saved: SavedSharding) -> tuple[str | None, Sharding | None]:
        """What is wrong, or a sharding."""
        mesh = self._mesh(saved)
        if mesh is None:
            return f"on {math.prod(saved.mesh_shape)} devices, and here are {len(jax.devices())}", None
        try:
            sharding = NamedSharding(mesh, PartitionSpec(*saved.partition))
        except ValueError as error:
            return str(error).split("\n")[0], None
        return sharding_problem(shape, sharding), sharding

    def _mesh(self, saved: SavedSharding) -> Mesh | None:
        if not self.context.empty:
            return self.context
        key = saved.mesh_shape, saved.axis_names
        if key not in self.made:
            if math.prod(saved.mesh_shape) != len(jax.devices()):
                return None
            self.made[key] = jax.make_mesh(*key, axis_types=(AxisType.Auto,) * len(saved.axis_names))
        return self.made[key]

    def whole(self) -> Sharding:
        """All of an array on every device of the first mesh."""
        for mesh in [self.context, *self.made.values()]:
            if not mesh.empty:
                return NamedSharding(mesh, PartitionSpec())
        return default_sharding()


def _does_not_fit(problems: list[tuple[str, str]], found: Iterable[SavedSharding | None]) -> TargetError:
    names = next(saved.axis_names for saved in found if saved is not None and saved.axis_names)
    return TargetError(
        "saved shardings that do not fit the devices here",
        leaves=problems,
        hint=f"give a mesh with these axes: with jax.set_mesh(jax.make_mesh((…), {names})): …; choose for each leaf: "
        "sharding=lambda path, spec: …; or leave sharding= out for the default device",
    )


def _carried(plan: Plan, node: Expr, xs: tuple[SavedSharding | None, ...]) -> SavedSharding | None:
    """The sharding of a node from those of its children."""
    if isinstance(node, Read):
        specs = plan.source if node.source is None else node.source.source.specs
        return specs[node.name].sharding
    first = xs[0] if xs else None
    if first is None or not first.axis_names:
        return first
    partition = (*first.partition, *(None,) * (len(node.children[0].shape) - len(first.partition)))
    match node:
        case Cast() | Affine() | MergeLora() | Slice() | Concat():
            return first
        case Index(_, axis) | Unreplicate(_, axis):
            partition = (*partition[:axis], *partition[axis + 1 :])
        case Stack(_, axis):
            partition = (*partition[:axis], None, *partition[axis:])
        case Transpose(_, perm):
            partition = tuple([partition[axis] for axis in perm])
        case Reshape(x, shape):
            sizes = defaultdict(
                lambda: 1, zip(first.axis_names, first.mesh_shape, strict=True)
            )  # files may name others
            partition = reshaped(shape, x.shape, partition, sizes)
    return replace(first, partition=partition)
