"""Restore: open, plan, check against the target, read."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jax.sharding import Sharding

from orbaxkit._checkpoint import Checkpoint, open_checkpoint
from orbaxkit._params import Which, find_params
from orbaxkit.arguments import one_of
from orbaxkit.errors import TargetError
from orbaxkit.execute.devices import run
from orbaxkit.execute.placing import default_sharding, place
from orbaxkit.execute.saved import saved_shardings
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.planning import Plan, Transform, make_plan
from orbaxkit.planning.target import Leniency, fit
from orbaxkit.specs import LeafSpec, nest
from orbaxkit.transforms import cast, rename, select
from orbaxkit.trees import Target, TargetLeaf, as_leaf, flatten

log = logging.getLogger("orbaxkit")

StripValue = Literal["auto"] | bool


def restore(
    checkpoint: Any,
    *transforms: Transform,
    target: Any = None,
    dtype: Any = None,
    sharding: Any = None,
    as_numpy: bool = False,
    strip_value: StripValue = False,
    on_missing: Literal["error", "keep"] = "error",
    on_unexpected: Literal["error", "ignore"] = "error",
    on_shape_mismatch: Literal["error", "keep"] = "error",
    step: int | None = None,
    item: str | None = None,
) -> Any:
    """Restore a checkpoint's tree, or what `transforms` make of it, into `target`'s containers or dicts and lists.

    Without a target, jax arrays go whole to the default device, or where `sharding` says; numpy arrays and numbers stay
    what they were saved as. With a target, its leaves (arrays or `jax.ShapeDtypeStruct`) decide shapes, dtypes and
    shardings. `as_numpy` gives host arrays and touches no device.

    In several processes (`jax.distributed`) each calls this and reads what its own devices hold; the default device is
    a local one. No process waits for another: where one fails, the others return, and wait at their next collective.

    Args:
        checkpoint: a path, a `CheckpointManager` or what `ok.open` returned.
        dtype: casts every floating-point array; naming it is the consent to round.
        sharding: one for all arrays, a function of path and spec, or "saved": as each was saved, on the mesh of
            `jax.set_mesh`, else on all devices in the mesh's saved shape; what was on one device is on all of them.
        strip_value: "auto" drops the `value` level that nnx and boxed params have where it is the only child.
        on_missing, on_shape_mismatch: "keep" keeps the target's concrete value for such leaves.
        on_unexpected: "ignore" leaves what the target lacks unread.

    Raises:
        CheckpointError: it cannot be opened, or data is missing or damaged.
        TargetError: the plan's leaves and the target's disagree, or a value does not survive its target's dtype.

    >>> state = ok.restore("runs/pi0", target=state)
    >>> blocks = ok.restore("runs/pi0", ok.select("params/blocks/**"), as_numpy=True)
    >>> blocks["params"]["blocks"]["bias"].shape
    (3, 8)
    """
    leniency = Leniency(on_missing, on_unexpected, on_shape_mismatch)
    one_of("strip_value", strip_value, ("auto", True, False), TargetError)
    _refuse_idle(target, sharding, as_numpy, leniency)
    ckpt = open_checkpoint(checkpoint, step=step, item=item)
    plan = make_plan(ckpt.specs, *transforms)
    if dtype is not None:
        plan = cast(dtype)(plan)
    if target is None:
        return _restore_free(ckpt, _strip(plan) if strip_value else plan, sharding, as_numpy)
    return _restore_into(ckpt, plan, target, leniency, as_numpy, bool(strip_value))


def _refuse_idle(target: Any, sharding: Any, as_numpy: bool, leniency: Leniency) -> None:
    """Options that would decide nothing."""
    if sharding is not None and (as_numpy or target is not None):
        why = "as_numpy=True puts arrays on no device" if as_numpy else "the target's leaves have shardings"
        raise TargetError(f"sharding= would be ignored: {why}", hint="leave one of them out")
    if sharding not in (None, "saved") and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TargetError(
            f"sharding={sharding!r} is neither a jax.sharding.Sharding nor a function",
            hint='sharding=lambda path, spec: …, or sharding="saved"',
        )
    if target is None and leniency != Leniency():
        raise TargetError("on_missing=, on_unexpected= and on_shape_mismatch= compare with a target; there is none")


def restore_params(
    checkpoint: Any,
    *,
    target: Any = None,
    which: Which | None = None,
    dtype: Any = None,
    sharding: Any = None,
    as_numpy: bool = False,
    strip_value: StripValue = "auto",
    on_missing: Literal["error", "keep"] = "error",
    on_unexpected: Literal["error", "ignore"] = "error",
    on_shape_mismatch: Literal["error", "keep"] = "error",
    step: int | None = None,
    item: str | None = None,
) -> Any:
    """Restore the params alone, wherever they are in the tree; the bytes of everything else stay unread.

    Finds `params`, `params/params`, an item of that name, a model beside an optimizer, or a bare tree of params, and
    logs which it took and why. The result, like `target`, is the params tree itself. Other arguments as in `restore`.

    Args:
        which: "ema" or "raw", where a checkpoint has averaged and live params.

    Raises:
        CheckpointError: there are no params, or several subtrees could be them; all are listed.

    >>> params = ok.restore_params("runs/pi0")
    >>> params["head"]["kernel"].dtype
    dtype(bfloat16)
    """
    ckpt = open_checkpoint(checkpoint, step=step, item=item)
    found = find_params(ckpt.specs, which)
    log.info("params taken from %s", found)
    return restore(
        ckpt,
        *_moved_to_root(found.path),
        target=target,
        dtype=dtype,
        sharding=sharding,
        as_numpy=as_numpy,
        strip_value=strip_value,
        on_missing=on_missing,
        on_unexpected=on_unexpected,
        on_shape_mismatch=on_shape_mismatch,
    )


def _moved_to_root(path: KeyPath) -> tuple[Transform, ...]:
    text = format_path(path)
    return (select(f"{text}/**"), rename({f"{text}/**": "**"})) if path else ()


def _strip(plan: Plan) -> Plan:
    """Drop the `value` level of leaves where it is the only child of its parent."""
    children = Counter(
        path for path, _ in {(o.path[:i], o.path[i]) for o in plan.outputs.values() for i in range(len(o.path))}
    )
    outputs = {}
    for output in plan.outputs.values():
        is_box = output.path[-1:] == ("value",) and children[output.path[:-1]] == 1
        path = output.path[:-1] if is_box and len(output.path) > 1 else output.path
        outputs[format_path(path)] = replace(output, path=path)
    return plan.with_outputs(outputs)


def _restore_free(ckpt: Checkpoint, plan: Plan, sharding: Any, as_numpy: bool) -> Any:
    """Without a target: nested dicts and lists, arrays where they belong by kind."""
    placed = [name for name, spec in plan.specs.items() if spec.kind in ("array", "key") and not as_numpy]
    if sharding == "saved":
        placements: dict[str, Sharding] = saved_shardings(plan, placed)
    else:
        placements = {name: _sharding_for(sharding, name, plan.specs[name]) for name in placed}
    values = _run(ckpt, plan, placements)
    return nest(((plan.specs.paths[name], value) for name, value in values.items()), plan.containers)


def _sharding_for(sharding: Any, name: str, spec: LeafSpec) -> Sharding:
    if sharding is None:
        return default_sharding()
    if isinstance(sharding, Sharding):
        return sharding
    chosen = sharding(name, spec)
    if not isinstance(chosen, Sharding):
        raise TargetError(
            f"sharding= gave {chosen!r}, which is no jax.sharding.Sharding",
            leaves=[(name, str(spec))],
            hint="NamedSharding(mesh, P()) keeps a leaf whole on every device",
        )
    return chosen


def _restore_into(
    ckpt: Checkpoint, plan: Plan, tree: Any, leniency: Leniency, as_numpy: bool, strip_value: bool
) -> Any:
    """With a target: check all of it, read what fills it, rebuild its containers."""
    target = flatten(tree)
    fitted = fit(plan.specs, target, leniency, strip_value=strip_value)
    outputs = {name: plan.outputs[source] for name, source in fitted.filled.items()}
    kept = {name: target.leaves[name].value for name in fitted.kept}
    return target.rebuild(kept | read_into(ckpt, plan.with_outputs(outputs), target, as_numpy))


def read_into(ckpt: Checkpoint, plan: Plan, target: Target, as_numpy: bool = False) -> dict[str, Any]:
    """The values of a plan whose outputs are named as the target's leaves, in the types and places that those want."""
    placements = {name: _target_placement(target.leaves[name], as_numpy) for name in plan.outputs}
    return _as_wanted(_run(ckpt, plan, placements), target, placements)


def _target_placement(leaf: TargetLeaf, as_numpy: bool) -> Sharding | None:
    if as_numpy or leaf.spec.kind not in ("array", "key"):
        return None
    return leaf.sharding if leaf.sharding is not None else _sharding_for(None, "", leaf.spec)


def _as_wanted(values: Mapping[str, Any], target: Target, placements: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers take the type of their target where their value survives; every one that does not is an error."""
    out, lost = {}, []
    for name, value in values.items():
        leaf = target.leaves[name]
        try:
            out[name] = _as_wanted_leaf(value, leaf, placements[name])
        except (ValueError, TypeError, OverflowError):
            lost.append((name, f"the value {value!r} does not survive as {leaf.spec}"))
    if lost:
        raise TargetError(
            "the target's types cannot hold these numbers", leaves=lost, hint="give the target a wider dtype there"
        )
    return out


def _as_wanted_leaf(value: Any, leaf: TargetLeaf, sharding: Sharding | None) -> Any:
    is_number = isinstance(value, (bool, int, float, complex, np.generic))
    if not is_number and leaf.spec.kind != "scalar":
        return value
    host = as_leaf(value, leaf)
    return host if sharding is None else place(host, sharding)


def _run(ckpt: Checkpoint, plan: Plan, placements: Mapping[str, Any]) -> dict[str, Any]:
    for note in ckpt.notes:
        log.info("%s: %s", ckpt.path, note)
    return run(plan, ckpt.source, placements)
