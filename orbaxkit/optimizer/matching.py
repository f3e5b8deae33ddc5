"""Match the leaves that a `tx` wants to those of a stored state, on specs alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orbaxkit.errors import TargetError, shorten
from orbaxkit.optimizer.roles import Place
from orbaxkit.optimizer.stored import StoredState, TextPath, text_path
from orbaxkit.paths import format_path
from orbaxkit.planning.numbers import category
from orbaxkit.planning.target import agree
from orbaxkit.trees import Target, TargetLeaf

Problem = tuple[str, str]


@dataclass(frozen=True)
class Matched:
    """Which stored leaf fills each wanted one, both by name, and what does not fit, by the stored path."""

    filled: Mapping[str, str]
    missing: Mapping[str, str]
    unexpected: tuple[Problem, ...]
    misfits: tuple[Problem, ...]

    @property
    def problems(self) -> list[Problem]:
        """Everything that does not fit."""
        return [*((path, "is wanted, and not in the checkpoint") for path in self.missing.values()), *self.rest]

    @property
    def rest(self) -> list[Problem]:
        """What does not fit besides leaves that are missing."""
        return [*self.misfits, *self.unexpected]


def find_leaf(leaf: TargetLeaf, by_path: Mapping[TextPath, str]) -> str | None:
    """The stored leaf of the same path, with or without the `value` level of a box."""
    path = text_path(leaf.path)
    return by_path.get(path) or (by_path.get(path[:-1]) if leaf.is_boxed else None)


def match_leaves(schema: Target, state: StoredState) -> Matched:
    """Match every leaf by its path within the state; field names decide, never positions."""
    filled: dict[str, str] = {}
    missing: dict[str, str] = {}
    misfits: list[Problem] = []
    for name, leaf in schema.leaves.items():
        stored = find_leaf(leaf, state.by_path)
        if stored is None:
            missing[name] = format_path(state.root + leaf.path)
        elif (problem := misfit(leaf, state, stored)) is not None:
            misfits.append((stored, problem))
        else:
            filled[name] = stored
    used = {*filled.values(), *(stored for stored, _ in misfits)}
    extra = [stored for stored in dict.fromkeys(state.by_path.values()) if stored not in used]
    unexpected = tuple((stored, f"is in the checkpoint ({state.whole[stored]}), and not wanted") for stored in extra)
    return Matched(filled, missing, unexpected, tuple(misfits))


def misfit(leaf: TargetLeaf, state: StoredState, stored: str) -> str | None:
    """Why a stored leaf cannot be this one, or None."""
    found = state.whole[stored]
    if found.kind != "string" and found.shape != leaf.spec.shape:
        return f"shape: found {found}, wanted {leaf.spec}"
    if agree(found, leaf) or _are_floats(found.dtype, leaf.spec.dtype):
        return None
    return f"dtype: found {found}, wanted {leaf.spec}"


def _are_floats(found: np.dtype | None, wanted: np.dtype | None) -> bool:
    """Moments keep the dtype that training gave them: optax makes bfloat16 ones float32 with its first update."""
    return found is not None and wanted is not None and category(found) == category(wanted) == "float"


def refuse_mismatch(matched: Matched, places: Mapping[str, Place], where: object) -> None:
    """Raise one error for all that does not fit, with the option that settles it."""
    if not matched.problems:
        return
    new = params_without_moments(matched, places)
    if new and not matched.rest:
        raise no_moments(new, matched, where)
    if matched.misfits:
        what = "the optimizer state was saved for other params"
        hint = "params=…, in the shapes and dtypes they were trained in; or a fresh state: ok.reset_optimizer(ckpt, tx)"
    else:
        what = "the optimizer state in the checkpoint is not one of this tx"
        hint = "ok.migrate_opt_state(ckpt, tx) moves its moments by role; ok.rebuild_opt_state(ckpt) takes it as it is"
    raise TargetError(what, leaves=matched.problems, where=where, hint=hint)


def no_moments(params: list[str], matched: Matched, where: object) -> TargetError:
    """The error for params that were frozen when the state was saved."""
    hint = (
        "params that are still frozen: params=…, only those that are trained; to train them from now on: "
        'ok.migrate_opt_state(ckpt, tx, on_missing="init")'
    )
    leaves = [(path, "is not in the checkpoint") for path in matched.missing.values()]
    return TargetError(f"no moments for {', '.join(shorten(params))}", leaves=leaves, where=where, hint=hint)


def params_without_moments(matched: Matched, places: Mapping[str, Place]) -> list[str]:
    """The params of which all that is missing are moments, where other params have them; none if more is missing."""
    have = {(places[name].node, places[name].field) for name in matched.filled}
    missing = [places[name] for name in matched.missing]
    if not all(place.is_mirror and (place.node, place.field) in have for place in missing):
        return []
    return list(dict.fromkeys(format_path(place.rest) for place in missing))
