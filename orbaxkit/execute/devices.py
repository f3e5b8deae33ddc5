"""Run a plan: read what each output needs, once, into host arrays or sharded device arrays."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from orbaxkit.errors import TargetError
from orbaxkit.execute.gather import Gather, on_host
from orbaxkit.execute.kernels import evaluate, must_see_values
from orbaxkit.execute.pieces import full, is_gathered, volume
from orbaxkit.execute.pullback import pull_back
from orbaxkit.execute.reading import check_memory, check_readable
from orbaxkit.formats import Source
from orbaxkit.planning import Expr, Plan
from orbaxkit.planning.nodes import Fill, Read
from orbaxkit.planning.numbers import WIDE
from orbaxkit.planning.regions import Spans
from orbaxkit.specs import LeafSpec, Specs

# Where an output goes: a sharding, or None for a host array.
Placements = Mapping[str, Sharding | None]

EMPTY: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": tuple,
}


def run(plan: Plan, source: Source, placements: Placements) -> dict[str, Any]:
    """Every output of `plan`, read from `source`: host arrays, device arrays under their shardings, numbers, strings.

    Raises CheckpointError before any read where data is missing or would not fit in memory, TargetError where a 64-bit
    array would be narrowed because jax has 64-bit types switched off.
    """
    specs = plan.specs
    _refuse_narrowing(specs, placements)
    _check_shardings(specs, placements)
    check_readable(plan, source)
    check_memory(sum(_host_bytes(spec, placements.get(name)) for name, spec in specs.items()))
    values = _gathered(plan, specs, source, placements)
    for group in plan.groups:
        computed = [name for name in group if name not in values]
        if computed:
            values |= _computed(plan, computed, source, placements)
    return {name: values[name] for name in plan.outputs}


def _host_bytes(spec: LeafSpec, sharding: Sharding | None) -> int:
    """The memory of this host that an output stays in: all of it, the parts that its CPU devices hold, or none."""
    if sharding is None:
        return spec.nbytes
    indices = sharding.addressable_devices_indices_map(spec.shape)
    if any(getattr(device, "platform", "cpu") != "cpu" for device in sharding.device_set):
        return 0
    parts = {_spans(index, spec.shape) for index in indices.values()}
    return sum(spec.nbytes * volume(part) // max(1, math.prod(spec.shape)) for part in parts)


def _gathered(plan: Plan, specs: Specs, source: Source, placements: Placements) -> dict[str, Any]:
    """The outputs that need no kernel."""
    finish: dict[str, Callable[[], Any]] = {}
    gather = Gather(source)
    for name, output in plan.outputs.items():
        if specs[name].kind in ("scalar", "string", "empty") and isinstance(output.expr, (Read, Fill)):
            finish[name] = _plain(source, output.expr, specs[name])
        elif is_gathered(output.expr):
            finish[name] = want(gather, output.expr, placements.get(name))
    gather.run()
    return {name: done() for name, done in finish.items()}


def _computed(plan: Plan, names: list[str], source: Source, placements: Placements) -> dict[str, Any]:
    """A group of outputs that share what they read: on the devices where they belong, or on the host."""
    exprs = {name: plan.outputs[name].expr for name in names}
    hosted = [name for name in names if placements.get(name) is None or must_see_values(exprs[name])]
    hosts = on_host([exprs[name] for name in hosted], source)
    values = {name: _placed(host, exprs[name], placements.get(name)) for name, host in zip(hosted, hosts, strict=True)}
    rest = [name for name in names if name not in values]
    wanted = {name: (exprs[name], sharding) for name in rest if (sharding := placements[name]) is not None}
    return values | _on_devices(wanted, source)


def _placed(host: np.ndarray, expr: Expr, sharding: Sharding | None) -> Any:
    value = as_value(host, expr)
    return value if sharding is None else jax.device_put(value, sharding)


def as_value(host: np.ndarray, expr: Expr) -> Any:
    """What an expression's host array stands for: itself, or the typed PRNG keys whose words it holds."""
    if expr.kind != "key":
        return host
    return jax.random.wrap_key_data(jax.numpy.asarray(host), impl=expr.element.key_impl)


def _on_devices(wanted: Mapping[str, tuple[Expr, Sharding]], source: Source) -> dict[str, Any]:
    """Read the gathered parts under shardings pulled back from the outputs', run the kernels, free what was read."""
    gather = Gather(source)
    finish: dict[tuple[int, Sharding], Callable[[], Any]] = {}
    sharing: dict[tuple[tuple[int, Sharding], ...], list[str]] = {}
    for name, (expr, sharding) in wanted.items():
        inputs = _inputs(expr, sharding)
        sharing.setdefault(tuple((id(node), inner) for node, inner in inputs), []).append(name)
        for node, inner in inputs:
            if (id(node), inner) not in finish:
                finish[id(node), inner] = want(gather, node, inner)
    gather.run()
    arrays = {key: done() for key, done in finish.items()}
    values: dict[str, Any] = {}
    for keys, names in sharing.items():
        exprs, shardings = zip(*(wanted[name] for name in names), strict=True)
        given = {key[0]: arrays[key] for key in keys}
        values |= zip(names, evaluate(exprs, given, shardings), strict=True)
    for array in arrays.values():
        array.delete()
    return values


def _inputs(expr: Expr, sharding: Sharding | None) -> list[tuple[Expr, Any]]:
    """The largest gathered parts of an expression, each with the sharding that it is wanted under."""
    if is_gathered(expr):
        return [(expr, sharding)]
    inner = [None] * len(expr.children) if sharding is None else pull_back(expr, sharding)
    return [found for x, s in zip(expr.children, inner, strict=True) for found in _inputs(x, s)]


def _plain(source: Source, expr: Expr, spec: LeafSpec) -> Callable[[], Any]:
    """A number, a string or an empty node."""
    if spec.kind == "empty":
        return EMPTY[str(spec.empty)]
    if not isinstance(expr, Read):  # a fill
        return lambda: expr.value if expr.kind == "string" else np.asarray(expr.value).astype(expr.dtype).item()
    held = source if expr.source is None else expr.source.source
    return lambda: held.value(expr.name)


def want(gather: Gather, expr: Expr, sharding: Sharding | None) -> Callable[[], Any]:
    """Ask for an array, whole on the host or in the parts that local devices hold; call the result once it is read."""
    if expr.kind == "key":
        return _want_keys(gather, expr, sharding)
    if sharding is None:
        hosts: list[np.ndarray] = []
        gather.want(expr, full(expr.shape), hosts.append)
        return hosts.pop
    devices_of: dict[Spans, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(expr.shape).items():
        devices_of.setdefault(_spans(index, expr.shape), []).append(device)
    shards: list[Any] = []

    def place(host: np.ndarray, devices: list[Any]) -> None:
        shards.extend(jax.device_put(host, _on(device, sharding)) for device in devices)

    for part, devices in devices_of.items():
        gather.want(expr, part, partial(place, devices=devices))
    return lambda: jax.make_array_from_single_device_arrays(expr.shape, sharding, shards)


def _want_keys(gather: Gather, expr: Expr, sharding: Sharding | None) -> Callable[[], Any]:
    """Typed PRNG keys: their uint32 words, wrapped."""
    words: list[np.ndarray] = []
    gather.want(expr, full(expr.shape), words.append)

    return lambda: _placed(words.pop(), expr, sharding)


def _spans(index: Any, shape: tuple[int, ...]) -> Spans:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _on(device: Any, sharding: Sharding) -> Sharding:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _check_shardings(specs: Mapping[str, LeafSpec], placements: Placements) -> None:
    """Shardings that cannot hold their leaf, all of them, before anything is read."""
    found = (
        (name, _sharding_problem(specs[name].shape, sharding)) for name, sharding in placements.items() if sharding
    )
    problems = [(name, f"{specs[name]}: {problem}") for name, problem in found if problem]
    if problems:
        raise TargetError(
            "shardings that do not fit their leaves",
            leaves=problems,
            hint="a function of path and spec can choose for each leaf: sharding=lambda path, spec: …",
        )


def _sharding_problem(shape: tuple[int, ...], sharding: Sharding) -> str | None:
    if isinstance(sharding, NamedSharding):
        if isinstance(sharding.mesh, AbstractMesh):
            return "its mesh is abstract: it names no devices"
        if len(sharding.spec) > len(shape):
            return f"P{tuple(sharding.spec)} has more axes"
        pieces = [_pieces_along(sharding.mesh, names) for names in sharding.spec]
        uneven = [(axis, count) for axis, count in enumerate(pieces) if shape[axis] % count]
        return f"axis {uneven[0][0]} does not divide into {uneven[0][1]}" if uneven else None
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        return str(error).split("\n")[0]
    return None


def _pieces_along(mesh: Any, names: Any) -> int:
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return math.prod(mesh.shape[name] for name in names if isinstance(name, str))


def _refuse_narrowing(specs: Mapping[str, LeafSpec], placements: Placements) -> None:
    """jax halves 64-bit dtypes while x64 is off; say so instead."""
    wide = [
        (name, f"{spec} as a jax array")
        for name, spec in specs.items()
        if placements.get(name) is not None and spec.kind in ("array", "numpy") and spec.dtype is not None
        and spec.dtype.name in WIDE
    ]  # fmt: skip
    if not wide:
        return
    if not jax.config.jax_enable_x64:
        raise TargetError(
            f"{len(wide)} 64-bit {'array' if len(wide) == 1 else 'arrays'}, and jax has 64-bit types switched off",
            leaves=wide,
            hint='jax.config.update("jax_enable_x64", True), as_numpy=True, or name a cast: ok.cast("int32", pattern)',
        )
