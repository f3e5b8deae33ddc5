"""Run a plan: read what each output needs, once, into host arrays or sharded device arrays."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from orbaxkit.errors import TargetError
from orbaxkit.execute.gather import Gather, on_host
from orbaxkit.execute.kernels import evaluate, must_see_values
from orbaxkit.execute.pieces import full, is_gathered
from orbaxkit.execute.placing import Shards, check_shardings, host_bytes, parts_of
from orbaxkit.execute.pullback import pull_back
from orbaxkit.execute.reading import check_memory, check_readable
from orbaxkit.execute.restricting import restrict
from orbaxkit.formats import Source
from orbaxkit.planning import Expr, Plan
from orbaxkit.planning.nodes import Fill, Read
from orbaxkit.planning.numbers import WIDE
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

    In several processes each reads what its own devices hold, each part of an array once, and no process waits for
    another: under the shardings pulled back to them, kernels exchange nothing.

    Raises CheckpointError before any read where data is missing or would not fit in memory, TargetError where a 64-bit
    array would be narrowed because jax has 64-bit types switched off.
    """
    specs = plan.specs
    _refuse_narrowing(specs, placements)
    check_shardings(specs, placements)
    check_readable(plan, source)
    check_memory(sum(host_bytes(spec, placements.get(name)) for name, spec in specs.items()))
    values = _gathered(plan, specs, source, placements)
    for group in plan.groups:
        computed = [name for name in group if name not in values]
        if computed:
            values |= _computed(plan, computed, source, placements)
    return {name: values[name] for name in plan.outputs}


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
    values = _on_host({name: (exprs[name], placements.get(name)) for name in hosted}, source)
    rest = [name for name in names if name not in values]
    wanted = {name: (exprs[name], sharding) for name in rest if (sharding := placements[name]) is not None}
    return values | _on_devices(wanted, source)


def _on_host(wanted: Mapping[str, tuple[Expr, Sharding | None]], source: Source) -> dict[str, Any]:
    """Compute with numpy what stays on the host, and of what goes to devices the parts that local ones hold."""
    parts = {name: parts_of(expr.shape, s) if s else {full(expr.shape): []} for name, (expr, s) in wanted.items()}
    exprs = [restrict(wanted[name][0], part) for name in wanted for part in parts[name]]
    hosts = iter(on_host(exprs, source))
    values: dict[str, Any] = {}
    for name, (expr, sharding) in wanted.items():
        shards = None if sharding is None else Shards(expr.shape, _dtype(expr), sharding)
        for devices in parts[name].values():
            value = as_value(next(hosts), expr)
            if shards is None:
                values[name] = value
            else:
                shards.add(value, devices)
        if shards is not None:
            values[name] = shards.array()
    return values


def as_value(host: np.ndarray, expr: Expr) -> Any:
    """What an expression's host array stands for: itself, or the typed PRNG keys whose words it holds."""
    if expr.kind != "key":
        return host
    words: Any = host  # jnp.asarray would lay them on the mesh that is set, with all its processes
    return jax.random.wrap_key_data(words, impl=expr.element.key_impl)


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
    if sharding is None:
        hosts: list[np.ndarray] = []
        gather.want(expr, full(expr.shape), hosts.append)
        return lambda: as_value(hosts.pop(), expr)
    shards = Shards(expr.shape, _dtype(expr), sharding)

    def add(host: np.ndarray, devices: list[Any]) -> None:
        shards.add(as_value(host, expr), devices)

    for part, devices in parts_of(expr.shape, sharding).items():
        gather.want(expr, part, partial(add, devices=devices))
    return shards.array


def _dtype(expr: Expr) -> Any:
    """The dtype of the values: for typed PRNG keys not that of their words."""
    if expr.kind != "key":
        return expr.dtype
    return jax.eval_shape(lambda: jax.random.key(0, impl=expr.element.key_impl)).dtype


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
