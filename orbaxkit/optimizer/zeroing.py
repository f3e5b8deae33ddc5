"""Start an optimizer state again without the optimizer: what is known to start at zero does, all else is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orbaxkit.errors import TargetError, shorten
from orbaxkit.optimizer.roles import Place, stored_places
from orbaxkit.optimizer.stored import StoredState, stored_state
from orbaxkit.optimizer.words import bias_mismatches, chosen, known_words, refuse_mismatches
from orbaxkit.paths import KeyPath
from orbaxkit.planning import Element, Output, Plan
from orbaxkit.planning import expressions as ex
from orbaxkit.slots import EMA_NAMES, Slot, strip_value
from orbaxkit.specs import LeafSpec, Specs
from orbaxkit.states import StateClass

Problem = tuple[str, str]


@dataclass(frozen=True)
class Zeroing:
    """The leaves that become zero, and what the user should know. A transform."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __call__(self, plan: Plan) -> Plan:
        """Fill these leaves with zeros; all others stay."""
        outputs = dict(plan.outputs)
        for name in self.names:
            spec = plan.specs[name]
            outputs[name] = Output(outputs[name].path, ex.fill(_zero(spec), spec.shape, Element.of(spec)))
        return replace(plan, outputs=outputs)


def _zero(spec: LeafSpec) -> int | float | complex | bool:
    kind = "f" if spec.dtype is None else spec.dtype.kind
    return {"b": False, "i": 0, "u": 0, "c": 0j}.get(kind, 0.0)


def plan_zeroing(
    specs: Specs,
    keep: tuple[str, ...] = (),
    only: tuple[str, ...] | None = None,
    *,
    at: str | None = None,
    allow_bias_mismatch: bool = False,
    where: object = None,
) -> Zeroing:
    """Decide about every leaf of the optimizer state at `at`, and about the step, which starts at 0 unless it is kept.

    `keep` and `only` are words as in `reset_optimizer`. With `only`, the step stays.

    Raises TargetError: fields that start again and do not start at zero as far as is known, all named; words that mean
    nothing; counts parted from their moments.
    """
    state = stored_state(specs, at, where)
    places = stored_places(state)
    step = _outer_step(specs, state)
    fresh = _fresh(state, places, keep, only, step, where)
    _refuse_unknown(state, places, fresh, where)
    if not allow_bias_mismatch:
        refuse_mismatches(bias_mismatches(places, fresh & set(places), state.root), where)
    names = [name for name in specs if name in fresh]
    if step is not None and only is None and "step" not in keep:
        names.append(step)
    return Zeroing(tuple(names), tuple(_notes(specs, state, fresh, names)))


def _outer_step(specs: Specs, state: StoredState) -> str | None:
    """The training step: the number called `step` nearest to the top, outside the optimizer state."""
    inside = set(state.names.values())
    found = [
        (len(path), name)
        for name, path in specs.paths.items()
        if name not in inside and strip_value(path)[-1:] == ("step",) and specs[name].shape == ()
    ]
    return min(found)[1] if found else None


def _fresh(
    state: StoredState,
    places: Mapping[str, Place],
    keep: tuple[str, ...],
    only: tuple[str, ...] | None,
    step: str | None,
    where: object,
) -> set[str]:
    params: KeyPath = state.params or ()
    kept, idle = chosen(keep, places, state.root, params)
    fresh = {stored for name, stored in state.names.items() if state.specs[name].kind != "empty"}
    unknown = idle - ({"step"} if step is not None else set())
    if only is not None:
        fresh, none = chosen(only, places, state.root, params)
        unknown |= none
    if unknown:
        raise TargetError(
            "keep and only name what is not there",
            leaves=[(word, "means nothing in this optimizer state") for word in sorted(unknown)],
            where=where,
            hint=f"words that do: {known_words(places)}, step, or a pattern of paths",
        )
    return fresh - kept


def _refuse_unknown(state: StoredState, places: Mapping[str, Place], fresh: set[str], where: object) -> None:
    owners = {state.names[name]: slot for slot in state.slots for names in slot.leaves.values() for name in names}
    problems: list[Problem] = []
    for stored in state.names.values():
        if stored in fresh:
            problem = _problem(places.get(stored), owners.get(stored))
            if problem:
                problems.append((stored, problem))
    if problems:
        fields = dict.fromkeys(places[name].field for name, _ in problems if name in places)
        keep = " ".join(f"--keep {field}" for field in shorten(fields)) or "--keep PATTERN"
        raise TargetError(
            "not everything in this optimizer state is known to start at zero",
            leaves=problems,
            where=where,
            hint=f"keep it: {keep}; or reset with the optimizer itself: ok.reset_optimizer(path, tx)",
        )


def _problem(place: Place | None, slot: Slot | None) -> str:
    """Why a leaf cannot simply become zero; "" where it can."""
    if place is None or slot is None:
        return "belongs to no optimizer state that is known"
    told = {_start(state, place.field) for state in slot.candidates if place.field in state.fields}
    if told == {""}:
        return ""
    return f"{place.field} of {place.state.label} {' or '.join(sorted(told - {''}))}"


def _start(state: StateClass, field: str) -> str:
    known = state.fields[field]
    if known.initial == "zero":
        return ""
    if known.initial == "params":
        return "starts as a copy of the params"
    if known.initial == "constant":
        value = f"at {known.value}" if known.value is not None else "at what an argument says"
        argument = f" ({known.argument})" if known.argument else ""
        return f"starts {value}{argument}, not at zero"
    return "starts at a value that only the optimizer knows"


def _notes(specs: Specs, state: StoredState, fresh: set[str], names: list[str]) -> list[str]:
    notes = []
    for slot in state.slots:
        touched = [state.names[name] for leaves in slot.leaves.values() for name in leaves]
        if fresh.isdisjoint(touched):
            continue
        where = state.stored_path(slot.key_path)
        if slot.default.name == "ScaleByAdamState":
            notes.append(f"{where} is taken for Adam's; {slot.default.note}: for Yogi use ok.reset_optimizer(path, tx)")
        elif slot.is_ambiguous:
            notes.append(f"{where} is one of {', '.join(str(one) for one in slot.candidates)}: all start at zero")
        set_by = {f: slot.default.fields[f].argument for f in slot.leaves if slot.default.fields[f].argument}
        notes += [f"{where}/{field} starts at zero unless {argument} was given" for field, argument in set_by.items()]
    averages = [name for name in specs if any(segment in EMA_NAMES for segment in specs.paths[name])]
    if any(name not in names for name in averages):
        notes.append(f"averages of the params stay as they are: {', '.join(shorten(averages, 2))}")
    return notes
