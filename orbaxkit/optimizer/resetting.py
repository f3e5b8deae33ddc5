"""Plan a reset: what of a train state comes from the checkpoint, what is fresh, what the target keeps as its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from orbaxkit.errors import CheckpointError, TargetError
from orbaxkit.optimizer.matching import find_leaf
from orbaxkit.optimizer.roles import Place, places_of, stored_places
from orbaxkit.optimizer.schema import abstract_state, placeholder
from orbaxkit.optimizer.stored import StoredState, find_states, find_step, leaves_below, stored_state, text_path
from orbaxkit.optimizer.words import chosen, is_meant, known_words
from orbaxkit.paths import KeyPath, compile_pattern, format_path
from orbaxkit.planning.target import agree
from orbaxkit.slots import EMA_NAMES, strip_value
from orbaxkit.specs import Specs, nest
from orbaxkit.trees import Target, TargetLeaf, children_of, flatten

Problem = tuple[str, str]


@dataclass(frozen=True)
class Frame:
    """The tree to fill: where its params and its optimizer state lie, and what the leaves of the state are.

    `places` goes by names within the state, and `names` says what its leaves are called in the target;
    `source_params` is where the params lie in the checkpoint.
    """

    target: Target
    params: Target
    params_root: KeyPath
    source_params: KeyPath
    root: KeyPath
    schema: Target
    places: Mapping[str, Place]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """The words of `keep=` and `only=`."""

    keep: tuple[str, ...]
    only: tuple[str, ...] | None


@dataclass(frozen=True)
class Reset:
    """`filled`: target leaf -> stored leaf; `own`: known values; `fresh`: leaves of the state that start again."""

    filled: dict[str, str]
    own: dict[str, Any]
    fresh: set[str]


def frame_of(
    specs: Specs, tx: Any, tree: Any, find_params: Callable[[Specs], KeyPath], at: str | None, where: object
) -> Frame:
    """Find the params and the optimizer state in the target, or lay out a dict for them.

    `find_params` finds params that no optimizer state mirrors. Raises TargetError where the target's optimizer state
    is not that of `tx`.
    """
    source = _params_beside(specs, at) or find_params(specs)
    if tree is None and _is_lookahead(specs, source):
        hint = "target={'params': optax.LookaheadParams.init_synced(params), …}"
        raise TargetError("lookahead's params are two trees, which a dict cannot hold", where=where, hint=hint)
    if tree is None:
        params = _all_params(specs, source, where)
        schema = abstract_state(tx, params)
        step = find_step(specs)
        whole = {"params": params, "opt_state": schema}
        if step is not None:
            whole["step"] = placeholder(specs[step])
        return _frame(whole, params, ("params",), source, ("opt_state",), schema)
    target = flatten(tree)
    roots = find_states(target.specs)
    params_root = (_params_beside(target.specs, None) if len(roots) == 1 else None) or find_params(target.specs)
    params = _subtree(tree, params_root)
    schema = abstract_state(tx, params)
    wanted = _by_plain_path(flatten(schema), ())
    for root in roots if wanted else ((),):
        if not wanted or set(_by_plain_path(target, root)) == set(wanted):
            return _frame(tree, params, params_root, source, root, schema)
        trained = _trained(target, params_root, root)
        some = abstract_state(tx, trained) if trained else schema
        if set(_by_plain_path(target, root)) == set(_by_plain_path(flatten(some), ())):
            return _frame(tree, trained, params_root, source, root, some)
    raise _other_state(target, roots, set(wanted), where)


def _is_lookahead(specs: Specs, root: KeyPath) -> bool:
    """Whether the params are one of two trees, the fast and the slow ones."""
    both = {(*root[:-1], name) for name in ("fast", "slow")}
    return root in both and both <= {path[: len(root)] for path in specs.paths.values()}


def _trained(target: Target, params_root: KeyPath, root: KeyPath) -> Any:
    """Those of the target's params that its optimizer state mirrors: not NNX's statistics and PRNG states."""
    mirrored = set(map(text_path, stored_state(target.specs, format_path(root)).mirrored))
    depth = len(params_root)
    return nest(
        (leaf.path[depth:], leaf.value)
        for leaf in target.leaves.values()
        if leaf.path[:depth] == params_root and text_path(strip_value(leaf.path[depth:])) in mirrored
    )


def _all_params(specs: Specs, root: KeyPath, where: object) -> Any:
    """The arrays below a node as params that are all trained."""
    inside = {name: path[len(root) :] for name, path in specs.paths.items() if path[: len(root)] == root}
    keys = [(name, f"is {specs[name]}") for name in inside if specs[name].kind == "key"]
    if keys:
        hint = "give the tree to fill, in which the optimizer has the params alone: target=…"
        raise TargetError("PRNG keys among the params cannot be trained", leaves=keys, where=where, hint=hint)
    arrays = [(strip_value(path), specs[name]) for name, path in inside.items()]
    return nest((path, placeholder(spec)) for path, spec in arrays if spec.kind != "string")


def _frame(tree: Any, params: Any, params_root: KeyPath, source: KeyPath, root: KeyPath, schema: Any) -> Frame:
    target, state = flatten(tree), flatten(schema)
    here = _by_plain_path(target, root)
    names = {name: here[path] for path, name in _by_plain_path(state, ()).items()}
    return Frame(target, flatten(params), params_root, source, root, state, places_of(schema), names)


def _by_plain_path(target: Target, root: KeyPath) -> dict[tuple[str, ...], str]:
    """The leaves below a node by their paths from there, without the `value` of NNX's boxes."""
    depth = len(root)
    return {
        text_path(strip_value(leaf.path[depth:])): name
        for name, leaf in target.leaves.items()
        if leaf.path[:depth] == root
    }


def _params_beside(specs: Specs, at: str | None) -> KeyPath | None:
    """The params that an optimizer state mirrors, if there is one such state."""
    try:
        return stored_state(specs, at).params
    except CheckpointError:
        return None


def _subtree(tree: Any, path: KeyPath) -> Any:
    for segment in path:
        tree = children_of(tree)[0][str(segment)]
    return tree


def _other_state(
    target: Target, roots: tuple[KeyPath, ...], wanted: set[tuple[str, ...]], where: object
) -> TargetError:
    if not roots:
        what, leaves = "the target has no optimizer state", []
    else:
        root = roots[0]
        have = set(_by_plain_path(target, root))
        what = "the target's optimizer state is not that of tx"
        leaves = [(format_path(root + path), "tx has it, the target not") for path in sorted(wanted - have)]
        leaves += [(format_path(root + path), "the target has it, tx not") for path in sorted(have - wanted)]
    return TargetError(what, leaves=leaves, where=where, hint="make the target with this tx, or leave target= out")


def plan_reset(
    specs: Specs, frame: Frame, choice: Choice, keep_missing: bool, keep_shapes: bool, at: str | None, where: object
) -> Reset:
    """Decide about every leaf. Raises TargetError with all that does not fit."""
    fresh = _fresh_names(frame, choice, where)
    reset = Reset({}, {}, fresh)
    problems: list[Problem] = []
    _fill_state(specs, frame, choice, reset, at, where)
    here = set(frame.names.values())
    everywhere, params = leaves_below(specs, ()), leaves_below(specs, frame.source_params)
    depth = len(frame.params_root)
    for name, leaf in frame.target.leaves.items():
        if name in here:
            continue
        if leaf.path[:depth] == frame.params_root:
            short = TargetLeaf(leaf.path[depth:], leaf.value, leaf.spec, leaf.is_boxed)
            named = choice.only is not None and any(_matches(word, leaf.path) for word in choice.only)
            _fill_param(
                name,
                leaf,
                find_leaf(short, params),
                specs,
                keep_missing or named,
                keep_shapes or named,
                reset,
                problems,
            )
        else:
            _fill_other(name, leaf, everywhere, specs, choice, reset, problems)
    if problems:
        hint = 'on_missing="keep" and on_shape_mismatch="keep" keep the target\'s own params; keep=("ema",) an average'
        raise TargetError("the checkpoint does not fill the target", leaves=problems, where=where, hint=hint)
    return reset


def _matches(word: str, path: KeyPath) -> bool:
    return compile_pattern(word).match(path) is not None or compile_pattern(f"**/{word}").match(path) is not None


def _fresh_names(frame: Frame, choice: Choice, where: object) -> set[str]:
    """The leaves of the state that start again."""
    others = _outside(frame)
    outside = {word for word in choice.keep if any(_is_outside(word, path) for path in others)}
    words = tuple([word for word in choice.keep if word != "step" or word not in outside])  # the tree's, not a field
    kept, idle = chosen(words, frame.places, frame.root, frame.params_root)
    fresh = set(frame.places)
    unknown = idle - outside
    if choice.only is not None:
        fresh, none = chosen(choice.only, frame.places, frame.root, frame.params_root)
        unknown |= none
    if unknown:
        leaves = [(word, "means nothing in this optimizer state") for word in sorted(unknown)]
        hint = (
            f"words that do: {known_words(frame.places)}, step and ema where the tree has them, or a pattern of paths"
        )
        raise TargetError("keep= and only= name what is not there", leaves=leaves, where=where, hint=hint)
    return fresh - kept


def _is_outside(word: str, path: KeyPath) -> bool:
    """Whether a word of `keep` means a leaf that is no optimizer's: the step, an average, or a path."""
    if word == "ema" and any(segment in EMA_NAMES for segment in path):
        return True
    return _matches(word, strip_value(path))


def _outside(frame: Frame) -> list[KeyPath]:
    depth = len(frame.root)
    return [leaf.path for leaf in frame.target.leaves.values() if not frame.root or leaf.path[:depth] != frame.root]


def _fill_state(specs: Specs, frame: Frame, choice: Choice, reset: Reset, at: str | None, where: object) -> None:
    """Where what is kept of the state comes from: the same path in the checkpoint, or the one count of a schedule."""
    kept = [name for name in frame.places if name not in reset.fresh]
    if not kept:
        return
    state = stored_state(specs, at, where)
    problems: list[Problem] = []
    for name in kept:
        leaf = frame.schema.leaves[name]
        stored = find_leaf(leaf, state.by_path) or _by_role(frame.places[name], state)
        if stored is None:
            problems.append((format_path(state.root + leaf.path), "is to be kept, and not in the checkpoint"))
        elif specs[stored].shape != leaf.spec.shape or not agree(specs[stored], leaf):
            problems.append((stored, f"is to be kept: found {specs[stored]}, wanted {leaf.spec}"))
        else:
            reset.filled[frame.names[name]] = stored
    if choice.only is not None:
        problems += _left_over(specs, frame, choice.only, state, reset)
    if problems:
        hint = "reset these too (only=, keep=), or move the state to this tx: ok.migrate_opt_state(ckpt, tx)"
        raise TargetError("what is kept of the optimizer state does not fit", leaves=problems, where=where, hint=hint)


def _by_role(place: Place, state: StoredState) -> str | None:
    if place.role != "count" or not is_meant("schedule", place, (), ()):
        return None
    found = [n for n, p in stored_places(state).items() if p.role == "count" and is_meant("schedule", p, (), ())]
    return found[0] if len(found) == 1 else None


def _left_over(specs: Specs, frame: Frame, only: tuple[str, ...], state: StoredState, reset: Reset) -> list[Problem]:
    """Stored leaves that would be lost although nothing says so."""
    wanted = {text_path(leaf.path) for leaf in frame.schema.leaves.values()}
    places = stored_places(state)
    lost = []
    for path, name in state.by_path.items():
        is_told = name in places and any(is_meant(w, places[name], specs.paths[name], frame.params_root) for w in only)
        if path not in wanted and name not in reset.filled.values() and not is_told:
            lost.append((name, f"would be lost: found {specs[name]}, tx has no such leaf"))
    return list(dict.fromkeys(lost))


def _fill_param(
    name: str, leaf: TargetLeaf, stored: str | None, specs: Specs, may_lack: bool, may_differ: bool,
    reset: Reset, problems: list[Problem],
) -> None:  # fmt: skip
    if stored is not None and specs[stored].shape == leaf.spec.shape:
        if agree(specs[stored], leaf):
            reset.filled[name] = stored
        else:
            problems.append((name, f"dtype: found {specs[stored]}, target wants {leaf.spec}"))
        return
    allowed = may_lack if stored is None else may_differ
    if not allowed:
        found = "missing:" if stored is None else f"shape: found {specs[stored]},"
        problems.append((name, f"{found} target wants {leaf.spec}"))
    elif leaf.is_abstract:
        problems.append((name, "abstract in the target: there is no value to keep"))
    else:
        reset.own[name] = leaf.value


def _fill_other(
    name: str, leaf: TargetLeaf, stored: Mapping[tuple[str, ...], str], specs: Specs, choice: Choice,
    reset: Reset, problems: list[Problem],
) -> None:  # fmt: skip
    """The step, averages of the params, and whatever else the target has."""
    path = text_path(strip_value(leaf.path))
    is_step, is_ema = path[-1:] == ("step",), any(segment in EMA_NAMES for segment in path)
    is_kept = choice.only is not None or any(_is_outside(word, leaf.path) for word in choice.keep)
    if is_step and not is_kept:
        reset.own[name] = _zero(leaf)
        return
    if is_ema and not is_kept:
        if leaf.is_abstract:
            problems.append((name, "an average of the params that is not kept, and abstract in the target"))
        reset.own[name] = leaf.value
        return
    found = find_leaf(leaf, stored)
    if found is None and is_step:
        found = find_step(specs)
    if found is None:
        problems.append((name, f"missing: target wants {leaf.spec}"))
    elif specs[found].kind != "string" and (specs[found].shape != leaf.spec.shape or not agree(specs[found], leaf)):
        problems.append((name, f"found {specs[found]}, target wants {leaf.spec}"))
    else:
        reset.filled[name] = found


def _zero(leaf: TargetLeaf) -> Any:
    if isinstance(leaf.value, (bool, int, float)):
        return type(leaf.value)(0)
    return np.zeros_like(leaf.value) if isinstance(leaf.value, np.ndarray | np.generic) else jnp.zeros_like(leaf.value)
