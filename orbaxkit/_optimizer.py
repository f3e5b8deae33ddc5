"""Optimizer states: rebuilt with their optax types, reset, moved to another optimizer."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from orbaxkit._checkpoint import Checkpoint, open_checkpoint
from orbaxkit._params import find_params
from orbaxkit._restore import read_into
from orbaxkit.arguments import one_of, whole
from orbaxkit.errors import CheckpointError, TargetError, shorten
from orbaxkit.optimizer.classes import make_empty, make_state
from orbaxkit.optimizer.fresh import initial_leaves
from orbaxkit.optimizer.inference import Makers, infer
from orbaxkit.optimizer.matching import find_leaf, match_leaves, refuse_mismatch
from orbaxkit.optimizer.moving import Moves, distinct, plan_moves
from orbaxkit.optimizer.resetting import Choice, frame_of, plan_reset
from orbaxkit.optimizer.roles import places_of, stored_places
from orbaxkit.optimizer.schema import abstract_state, params_of, placeholder, with_shardings
from orbaxkit.optimizer.stored import StoredState, leaves_below, stored_state
from orbaxkit.optimizer.words import bias_mismatches, refuse_mismatches, words_of
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.planning import Output, Plan
from orbaxkit.planning import expressions as ex
from orbaxkit.slots import EMA_NAMES
from orbaxkit.specs import Specs
from orbaxkit.trees import Target, flatten

log = logging.getLogger("orbaxkit")

_MOST = 2**31 - 1


def rebuild_opt_state(
    checkpoint: Any,
    tx: Any = None,
    params: Any = None,
    *,
    assume: Mapping[str, Any] | None = None,
    at: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Any:
    """Rebuild the optimizer state of a checkpoint with its real optax types; only its own bytes are read.

    With `tx`, its structure is exactly that of `tx.init(params)`, and leaves match by field names; moments keep the
    floating-point dtype that they were saved in. Without, classes are inferred from stored class names, field names,
    order and shapes; `ckpt.describe()` tells what was certain.

    Args:
        params: the params, concrete or abstract, whose shardings the moments get; the checkpoint's own by default.
        assume: settles an ambiguous node: `{"opt_state/1/0": optax.ScaleByBeliefState}`.
        at: the path of the optimizer state, where there are several.

    Raises:
        CheckpointError: there is no optimizer state, or several.
        TargetError: the state is not one of `tx`, or not for these params; all leaves are listed.

    >>> opt_state = ok.rebuild_opt_state("runs/pi0", tx)
    >>> type(opt_state[0]).__name__
    'ScaleByAdamState'
    """
    ckpt = _open(checkpoint, step, item)
    state = stored_state(ckpt.specs, at, ckpt.path)
    if tx is not None and assume:
        raise TargetError("assume= settles what has to be guessed; with a tx nothing is", hint="leave one of them out")
    if tx is None:
        made, guesses = infer(state, assume, _makers(state))
        for guess in guesses:
            if guess.how == "ambiguous":
                log.info("%s: %s", ckpt.path, guess)
        schema = made if params is None else with_shardings(made, params)
    else:
        schema = abstract_state(tx, params_of(state, _params_root(state)) if params is None else params)
    target = flatten(schema)
    matched = match_leaves(target, state)
    refuse_mismatch(matched, places_of(schema), ckpt.path)
    return target.rebuild(read_into(ckpt, _plan(ckpt, target, matched.filled), target))


def migrate_opt_state(
    checkpoint: Any,
    tx: Any,
    params: Any = None,
    *,
    on_missing: Literal["error", "init"] = "error",
    on_unexpected: Literal["error", "ignore"] = "error",
    on_shape_mismatch: Literal["error", "init"] = "error",
    schedule_count: int | None = None,
    sources: Mapping[str, str] | None = None,
    allow_bias_mismatch: bool = False,
    at: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Any:
    """Continue a checkpoint's optimizer state under another optimizer: moments and counts move by what they are.

    States are matched by the fields they hold (Adam's within adamw, within chain(clip, adam), Lion's `mu`, …); what
    comes from where is one INFO record of the `orbaxkit` logger. Hyperparameters (`inject_hyperparams`) are the new
    tx's; moments keep the floating-point dtype that they were saved in.

    Args:
        params: those that are trained from now on, concrete or abstract; the checkpoint's own by default.
        on_missing: "init" starts params without moments as `tx.init` does; they share the count of the others.
        on_unexpected: "ignore" leaves the moments of params behind that are no more.
        on_shape_mismatch: "init" starts params of another shape as `tx.init` does; they too share the count.
        schedule_count: what schedules that are new count from; by default the count of the moments.
        sources: settles what continues what, by path: `{"1/0": "opt_state/0"}`.
        allow_bias_mismatch: moments may start at zero under a count that does not.
        at: the path of the optimizer state, where there are several.

    Raises:
        CheckpointError: there is no optimizer state, or several.
        TargetError: moments have no or several sources, params came or went; all leaves are listed.

    >>> opt_state = ok.migrate_opt_state("runs/pi0", optax.chain(optax.clip_by_global_norm(1.0), tx))
    """
    one_of("on_missing", on_missing, ("error", "init"), TargetError)
    one_of("on_unexpected", on_unexpected, ("error", "ignore"), TargetError)
    one_of("on_shape_mismatch", on_shape_mismatch, ("error", "init"), TargetError)
    ckpt = _open(checkpoint, step, item)
    state = stored_state(ckpt.specs, at, ckpt.path)
    known = params_of(state, _params_root(state)) if params is None else params
    schema = abstract_state(tx, known)
    target = flatten(schema)
    moves = plan_moves(
        target,
        places_of(schema),
        state,
        stored_places(state),
        schedule_count=None if schedule_count is None else _count(schedule_count),
        sources=sources,
    )
    leniency = on_missing == "init", on_unexpected == "ignore", on_shape_mismatch == "init"
    _refuse_moves(moves, *leniency, allow_bias_mismatch, ckpt.path)
    values = read_into(ckpt, _plan(ckpt, target, moves.filled), target)
    given = {name: jnp.full_like(target.leaves[name].value, count) for name, count in moves.counts.items()}
    fresh = initial_leaves(tx, _concrete(ckpt, state, known), moves.fresh) if moves.fresh else {}
    log.info("%s: %s", ckpt.path, _report(moves))
    return target.rebuild(values | given | fresh)


def _refuse_moves(
    moves: Moves, may_init: bool, may_ignore: bool, may_reshape: bool, allow_mismatch: bool, where: str
) -> None:
    problems = list(moves.problems)
    hints = ['sources={"state of tx": "stored state"} settles what continues what'] if problems else []
    if (moves.new_params or moves.unmatched) and not may_init:
        problems += [*moves.unmatched, *moves.new_params.values()]
        hints.append('on_missing="init" starts them as tx.init does')
    if moves.lost_params and not may_ignore:
        problems += moves.lost_params.values()
        hints.append('on_unexpected="ignore" leaves them behind')
    if moves.reshaped and not may_reshape:
        problems += moves.reshaped.values()
        hints.append('on_shape_mismatch="init" starts those of another shape as tx.init does')
    if problems:
        new = dict.fromkeys(param for param, _ in moves.new_params.values())
        only_new = bool(new) and len(hints) == 1 and not moves.problems and not moves.unmatched
        what = f"no moments for {', '.join(shorten(new))}" if only_new else "the optimizer state cannot be moved"
        raise TargetError(what, leaves=distinct(problems), where=where, hint="; ".join(hints))
    if not allow_mismatch:
        hint = "start afresh: ok.reset_optimizer(ckpt, tx); or say allow_bias_mismatch=True"
        refuse_mismatches(moves.mismatches, where, hint)


def _report(moves: Moves) -> str:
    lines = [*moves.report, *(f"{path} {told}" for path, told in moves.unmatched)]
    started = moves.new_params | moves.reshaped
    if started:
        names = dict.fromkeys(param for param, _ in started.values())
        lines.append(f"moments of {', '.join(names)} start as tx.init makes them; the count is shared with the others")
    if moves.lost_params:
        lines.append(f"moments left behind: {', '.join(dict.fromkeys(p for p, _ in moves.lost_params.values()))}")
    return "; ".join(["optimizer state moved", *lines])


def reset_optimizer(
    checkpoint: Any,
    tx: Any,
    *,
    target: Any = None,
    keep: str | Iterable[str] = (),
    only: str | Iterable[str] | None = None,
    allow_bias_mismatch: bool = False,
    on_missing: Literal["error", "keep"] = "error",
    on_shape_mismatch: Literal["error", "keep"] = "error",
    at: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Any:
    """Restore a checkpoint with a fresh optimizer: the state is that of `tx.init(params)`, the old one stays unread.

    Params (and what else the target has: batch statistics, …) come from the checkpoint. The new state is computed by
    one jitted call, under the params' shardings. The step starts at 0 and an averaged copy (EMA) of the params is the
    target's own, unless `keep` names them.

    Args:
        target: the tree to fill; without one the result is a dict of `params`, `opt_state` and, if saved, `step`.
        keep: what comes from the checkpoint all the same: "step", "ema", "schedule" (its counts), "nu" (a field),
            "adam" (a state), "adam/count", or a pattern of paths.
        only: what starts again, in the same words; everything else, the step too, comes from the checkpoint. A pattern
            of params (a new head: "params/head/**") means their moments; such params keep the target's value where the
            checkpoint has none of that shape.
        allow_bias_mismatch: counts may start again without their moments, and moments without their count.
        on_missing, on_shape_mismatch: "keep" keeps the target's concrete value for such params.
        at: the path of the optimizer state in the checkpoint, where there are several.

    Raises:
        CheckpointError: there are no params, or what is kept of the state is not there.
        TargetError: leaves that disagree, a word that means nothing, counts parted from their moments; all are listed.

    >>> fresh = ok.reset_optimizer("runs/pi0", tx, target=state, keep=("step",))
    >>> fresh["step"], int(fresh["opt_state"][0].count)
    (20000, 0)
    """
    one_of("on_missing", on_missing, ("error", "keep"), TargetError)
    one_of("on_shape_mismatch", on_shape_mismatch, ("error", "keep"), TargetError)
    ckpt = _open(checkpoint, step, item)
    frame = frame_of(ckpt.specs, tx, target, _find_params, at, ckpt.path)
    choice = Choice(words_of(keep), None if only is None else words_of(only))
    reset = plan_reset(ckpt.specs, frame, choice, on_missing == "keep", on_shape_mismatch == "keep", at, ckpt.path)
    if not allow_bias_mismatch:
        refuse_mismatches(bias_mismatches(frame.places, reset.fresh, frame.root), ckpt.path)
    values = reset.own | read_into(ckpt, _plan(ckpt, frame.target, reset.filled), frame.target)
    params = frame.params.rebuild(
        {name: values[format_path(frame.params_root + leaf.path)] for name, leaf in frame.params.leaves.items()}
    )
    fresh = initial_leaves(tx, params, reset.fresh)
    prefixed = {frame.names[name]: value for name, value in fresh.items()}
    log.info("%s: optimizer reset: %d leaves of %d start again", ckpt.path, len(fresh), len(frame.places))
    return frame.target.rebuild(values | prefixed)


def _open(checkpoint: Any, step: int | None, item: str | None) -> Checkpoint:
    """Open a checkpoint that has arrays, not just their names and shapes."""
    ckpt = open_checkpoint(checkpoint, step=step, item=item)
    unknown = [(n, f"{s}: its dtype is not known") for n, s in ckpt.specs.items() if s.kind == "array" and not s.dtype]
    if unknown:
        raise CheckpointError("these leaves are described, but not here", leaves=unknown, where=ckpt.path)
    return ckpt


def _count(value: Any) -> int:
    number = whole("schedule_count", value, least=0)
    if number > _MOST:
        raise TargetError(f"schedule_count={number}: optax counts in int32, to {_MOST:,}")
    return number


def _concrete(ckpt: Checkpoint, state: StoredState, params: Any) -> Any:
    """The params as arrays: what is abstract is read from the checkpoint."""
    target = flatten(params)
    lacking = [name for name, leaf in target.leaves.items() if leaf.is_abstract]
    if not lacking:
        return params
    root = _params_root(state)
    by_path = {} if root is None else leaves_below(ckpt.specs, root)
    found = {name: find_leaf(target.leaves[name], by_path) for name in lacking}
    problems = [(name, "is abstract, and not in the checkpoint") for name, stored in found.items() if stored is None]
    if problems:
        raise TargetError(
            "the params are needed to start new moments", leaves=problems, where=ckpt.path, hint="params=…, as arrays"
        )
    read = read_into(ckpt, _plan(ckpt, target, {n: s for n, s in found.items() if s is not None}), target)
    return target.rebuild({name: leaf.value for name, leaf in target.leaves.items()} | read)


def _find_params(specs: Specs) -> KeyPath:
    """Params that are trained, not averages of them."""
    has_both = any(segment in EMA_NAMES for path in specs.paths.values() for segment in path)
    return find_params(specs, "raw" if has_both else None).path


def _params_root(state: StoredState) -> KeyPath | None:
    """Where the params of a state are, by what it mirrors, else by their name."""
    try:
        return _find_params(state.whole) if state.params is None else state.params
    except CheckpointError:
        return None


def _makers(state: StoredState) -> Makers:
    return Makers(make_state, lambda name: placeholder(state.specs[name]), make_empty)


def _plan(ckpt: Checkpoint, target: Target, filled: Mapping[str, str]) -> Plan:
    """Reads of stored leaves, under the names of the target's."""
    outputs = {
        name: Output(target.leaves[name].path, ex.read(stored, ckpt.specs[stored])) for name, stored in filled.items()
    }
    return Plan(ckpt.specs, outputs)
