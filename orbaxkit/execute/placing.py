"""Where arrays go: shardings that fit, and putting host arrays on the local devices of one.

Nothing here talks to other processes: each of them puts what its own devices hold.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from orbaxkit.errors import TargetError
from orbaxkit.execute.pieces import slices
from orbaxkit.planning.regions import Spans
from orbaxkit.specs import LeafSpec


@dataclass
class Shards:
    """A device array that is put together from the parts that local devices hold."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    _arrays: list[jax.Array] = field(default_factory=list)

    def add(self, value: Any, devices: Iterable[Any]) -> None:
        """Put one part on each of the devices that hold it; CPU devices share a host array that is aligned."""
        self._arrays += [jax.device_put(value, on_device(device, self.sharding)) for device in devices]

    def array(self) -> jax.Array:
        """The array, once every part was added."""
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, self._arrays, dtype=self.dtype)


def parts_of(shape: tuple[int, ...], sharding: Sharding) -> dict[Spans, list[Any]]:
    """Each part of an array that local devices hold, once, and the devices that hold it."""
    devices_of: dict[Spans, list[Any]] = {}
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        spans = tuple([s.indices(size)[:2] for s, size in zip(index, shape, strict=True)])
        devices_of.setdefault(spans, []).append(device)
    return devices_of


def place(value: Any, sharding: Sharding) -> jax.Array:
    """A host array, or one on a local device, under a sharding that other processes may have a part in."""
    shards = Shards(value.shape, value.dtype, sharding)
    for part, devices in parts_of(value.shape, sharding).items():
        shards.add(value[slices(part)], devices)
    return shards.array()


def default_sharding() -> Sharding:
    """The first device of this process."""
    return SingleDeviceSharding(jax.local_devices()[0])


def on_device(device: Any, sharding: Sharding) -> Sharding:
    """One device, in the kind of memory that a sharding names."""
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def in_device_memory(sharding: Sharding) -> Sharding:
    """The same placement in the devices' own memory."""
    plain = sharding
    if isinstance(sharding, NamedSharding):
        plain = NamedSharding(sharding.mesh, sharding.spec)
    elif isinstance(sharding, SingleDeviceSharding):
        plain = SingleDeviceSharding(*sharding.device_set)
    return sharding if plain.memory_kind == sharding.memory_kind else plain


def host_bytes(spec: LeafSpec, sharding: Sharding | None) -> int:
    """The memory of this host that an array stays in: all of it, the parts that its CPU devices hold, or none.

    CPU devices share a part; each accelerator has its own in pinned host memory.
    """
    if sharding is None:
        return spec.nbytes
    parts = parts_of(spec.shape, sharding)
    if all(getattr(device, "platform", "cpu") == "cpu" for device in sharding.device_set):
        copies = len(parts)
    elif sharding.memory_kind in ("pinned_host", "unpinned_host"):
        copies = sum(map(len, parts.values()))
    else:
        return 0
    return copies * spec.nbytes // max(1, math.prod(spec.shape)) * math.prod(sharding.shard_shape(spec.shape))


def check_shardings(specs: Mapping[str, LeafSpec], placements: Mapping[str, Any]) -> None:
    """Raise TargetError for shardings that cannot hold their leaf, all of them, before anything is read."""
    found = ((name, sharding_problem(specs[name].shape, sharding)) for name, sharding in placements.items() if sharding)
    problems = [(name, f"{specs[name]}: {problem}") for name, problem in found if problem]
    if problems:
        raise TargetError(
            "shardings that do not fit their leaves",
            leaves=problems,
            hint="a function of path and spec can choose for each leaf: sharding=lambda path, spec: …; an axis that "
            "does not divide stays whole where its entry in P(…) is None",
        )


def sharding_problem(shape: tuple[int, ...], sharding: Sharding) -> str | None:
    """Why an array of this shape cannot lie under a sharding; None where it can."""
    if isinstance(sharding, NamedSharding):
        if isinstance(sharding.mesh, AbstractMesh):
            return "its mesh is abstract: it names no devices"
        if len(sharding.spec) > len(shape):
            return f"P{tuple(sharding.spec)} has more axes"
        pieces = [pieces_along(sharding.mesh.shape, names) for names in sharding.spec]
        uneven = [(axis, count) for axis, count in enumerate(pieces) if shape[axis] % count]
        return f"axis {uneven[0][0]} does not divide into {uneven[0][1]}" if uneven else None
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        return str(error).split("\n")[0]
    return None


def pieces_along(sizes: Mapping[str, int], names: Any) -> int:
    """Into how many pieces an entry of a `PartitionSpec` cuts its axis, from the sizes of the mesh's axes."""
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return math.prod(sizes[name] for name in names if isinstance(name, str))
