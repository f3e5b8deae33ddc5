"""Apply transforms to arrays in memory."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from orbaxkit.errors import TransformError
from orbaxkit.execute.devices import as_value
from orbaxkit.execute.gather import Gather
from orbaxkit.execute.kernels import evaluate, must_see_values
from orbaxkit.execute.pieces import full
from orbaxkit.growing import Grown, regrow
from orbaxkit.planning import Expr, Output, Plan, Transform, make_plan
from orbaxkit.planning.host import evaluate as evaluate_on_host
from orbaxkit.planning.nodes import Affine, Cast, MergeLora, Read, reads_of
from orbaxkit.trees import Target, flatten


def apply(tree: Any, *transforms: Transform) -> Any:
    """Apply transforms to a tree in memory; the new leaves come back in the same kinds of containers.

    Leaves that only move are the same objects; jax arrays are computed by jitted kernels where they lie, numpy arrays
    by numpy, and descriptions (`jax.ShapeDtypeStruct`) give descriptions. The tree itself is unchanged.

    Raises:
        TransformError: a rule cannot be applied to these leaves.
        TargetError: the result has leaves for which a container (a TrainState, a NamedTuple) has no place.

    >>> tree = {"layers": {"w": jnp.ones((2, 3))}}
    >>> ok.apply(tree, ok.unstack("layers", into="layers_{i}", axis=0)).keys()
    dict_keys(['layers_0', 'layers_1'])
    """
    target = flatten(tree)
    plan = make_plan(target.specs, *transforms)
    values = _values(plan, target)
    if plan == Plan.identity(target.specs):
        return target.rebuild(values)
    grown = [_grown(output, values[name], target) for name, output in plan.outputs.items()]
    return regrow(tree, grown)


def _grown(output: Output, value: Any, target: Target) -> Grown:
    reads = [read for read in reads_of(output.expr) if read.source is None]
    origin = target.leaves[reads[0].name] if reads else None
    return Grown(output.path, value, origin, keeps_axes=_keeps_axes(output.expr))


def _keeps_axes(expr: Expr) -> bool:
    return isinstance(expr, Read) or (type(expr) in (Affine, Cast, MergeLora) and _keeps_axes(expr.children[0]))


def _values(plan: Plan, target: Target) -> dict[str, Any]:
    """Each output in the way its inputs ask for."""
    values: dict[str, Any] = {}
    on_devices: dict[str, Output] = {}
    for name, output in plan.outputs.items():
        inputs = [target.leaves[read.name] for read in reads_of(output.expr) if read.source is None]
        if isinstance(output.expr, Read) and output.expr.source is None:
            values[name] = inputs[0].value
        elif any(leaf.is_abstract for leaf in inputs):
            values |= _traced(plan, name, target, jax.eval_shape)
        elif any(isinstance(leaf.value, jax.core.Tracer) for leaf in inputs):
            values |= _traced(plan, name, target, lambda function, leaves: function(leaves))
        elif not any(isinstance(leaf.value, jax.Array) for leaf in inputs) or must_see_values(output.expr):
            value = as_value(evaluate_on_host(output.expr, lambda read: _host_value(read, target)), output.expr)
            values[name] = jax.device_put(value) if any(isinstance(leaf.value, jax.Array) for leaf in inputs) else value
        else:
            on_devices[name] = output
    return values | _computed(on_devices, target)


def _traced(plan: Plan, name: str, target: Target, run: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
    """One output as a pure function of its leaves: inside the user's own `jax.jit`, or of descriptions."""
    function = plan.with_outputs({name: plan.outputs[name]}).as_function()
    return run(function, {read.name: target.leaves[read.name].value for read in reads_of(plan.outputs[name].expr)})


def _computed(outputs: Mapping[str, Output], target: Target) -> dict[str, Any]:
    if not outputs:
        return {}
    exprs = [output.expr for output in outputs.values()]
    _refuse_mixed_devices(outputs, target)
    given = {id(leaf): _device_value(leaf, target) for expr in exprs for leaf in _leaf_nodes(expr)}
    return dict(zip(outputs, evaluate(exprs, given, [None] * len(exprs)), strict=True))


def _refuse_mixed_devices(outputs: Mapping[str, Output], target: Target) -> None:
    mixed = []
    for name, output in outputs.items():
        values = (target.leaves[read.name].value for read in reads_of(output.expr) if read.source is None)
        places = {frozenset(x.sharding.device_set) for x in values if isinstance(x, jax.Array) and x.committed}
        if len(places) > 1:
            mixed.append((name, f"made of arrays on devices {' and '.join(sorted(map(_device_ids, places)))}"))
    if mixed:
        raise TransformError(
            "arrays on different devices cannot be joined",
            leaves=mixed,
            hint="jax.device_put them to one sharding first",
        )


def _device_ids(devices: Any) -> str:
    return str(sorted(device.id for device in devices))


def _leaf_nodes(expr: Expr) -> list[Read]:
    found: dict[int, Read] = {}
    pending = [expr]
    while pending:
        node = pending.pop()
        if isinstance(node, Read):
            found[id(node)] = node
        pending.extend(node.children)
    return list(found.values())


def _device_value(read: Expr, target: Target) -> jax.Array:
    value = target.leaves[read.name].value if read.source is None else _host_value(read, target)
    return value if isinstance(value, jax.Array) else jax.device_put(np.asarray(value, read.dtype))


def _host_value(read: Expr, target: Target) -> np.ndarray:
    if read.source is None:
        value = target.leaves[read.name].value
        return np.asarray(jax.random.key_data(value) if read.kind == "key" else value)
    hosts: list[np.ndarray] = []
    gather = Gather(read.source.source)
    gather.want(read, full(read.shape), hosts.append)
    gather.run()
    return hosts.pop()
