"""The words of `keep=` and `only=`: fields, kinds of state, params and paths; and what must not be parted."""

from collections.abc import Iterable, Mapping
from typing import Any

from orbaxkit.errors import TargetError, shorten
from orbaxkit.optimizer.roles import Place
from orbaxkit.optimizer.stored import TextPath
from orbaxkit.paths import KeyPath, compile_pattern, format_path

# These move a param by its sign alone: the count corrects nothing.
_WITHOUT_CORRECTION = {"ScaleByLionState"}


def words_of(value: Any) -> tuple[str, ...]:
    """One word or several."""
    given = () if value is None else (value,) if isinstance(value, str) or not isinstance(value, Iterable) else value
    words = tuple(given)
    bad = [word for word in words if not isinstance(word, str)]
    if bad:
        hint = 'like "step", "schedule", "nu", "params/head/**"'
        raise TargetError(f"{bad[0]!r} is no word of keep= or only=", hint=hint)
    return words


def is_meant(word: str, place: Place, path: KeyPath, params: KeyPath) -> bool:
    """Whether a word means a leaf of the optimizer state, at `path` of the tree whose params are at `params`.

    `nu` (a field), `adam` (a state), `adam/count` (a field of a state), `schedule` (counts that drive schedules),
    `params/head/**` or `head/**` (what mirrors these params), `opt_state/1/**` (paths).
    """
    kind, _, field = word.partition("/")
    if word == place.field or _is_kind(word, place):
        return True
    if field == place.field and _is_kind(kind, place):
        return True
    paths = [path, *([(*params, *place.rest), place.rest] if place.is_mirror and place.rest else [])]
    pattern = compile_pattern(word)
    return any(pattern.match(one) is not None for one in paths)


def _is_kind(word: str, place: Place) -> bool:
    label = place.state.label.lower()
    if word == "schedule":
        return label.endswith("schedule") or (label == "inject_hyperparams" and place.role == "count")
    return word.lower() in (label, label.replace(" ", "_"), place.state.name.lower())


def chosen(
    words: tuple[str, ...], places: Mapping[str, Place], root: KeyPath, params: KeyPath
) -> tuple[set[str], set[str]]:
    """The leaves that the words mean, and the words that mean none."""
    found: set[str] = set()
    idle: set[str] = set()
    for word in words:
        names = {
            name
            for name, place in places.items()
            if is_meant(word, place, (*root, *place.node, place.field, *place.rest), params)
        }
        found |= names
        idle |= set() if names else {word}
    return found, idle


def known_words(places: Mapping[str, Place]) -> str:
    """What can be said about a state, for messages."""
    fields = dict.fromkeys(place.field for place in places.values() if place.field)
    kinds = dict.fromkeys(place.state.label.lower() for place in places.values() if place.state.name)
    return ", ".join(shorten([*kinds, *fields], 12))


def bias_mismatches(places: Mapping[str, Place], fresh: set[str], root: KeyPath) -> list[tuple[str, str]]:
    """Counts that start again beside moments that do not, and the reverse.

    Adam divides by `1 - beta**count`: a count that is not that of its moments scales the first steps wrongly.
    Moments of single params that start again under a shared count are no mismatch.
    """
    nodes: dict[TextPath, dict[str, list[str]]] = {}
    for name, place in places.items():
        if place.state.name not in _WITHOUT_CORRECTION and place.role in ("count", "moment"):
            nodes.setdefault(place.node, {}).setdefault(place.field, []).append(name)
    problems = []
    for node, fields in nodes.items():
        roles = {field: places[names[0]].role for field, names in fields.items()}
        counts = [field for field in fields if roles[field] == "count"]
        moments = [field for field in fields if roles[field] == "moment"]
        for count in counts:
            is_fresh = fields[count][0] in fresh
            apart = [f for f in moments if _is_apart(fields[f], fresh, is_fresh)]
            if apart:
                told = "starts again, kept are" if is_fresh else "is kept, from the start begin"
                problems.append((format_path((*root, *node, count)), f"{told} {', '.join(apart)}"))
    return problems


def _is_apart(names: list[str], fresh: set[str], count_is_fresh: bool) -> bool:
    return any(n not in fresh for n in names) if count_is_fresh else all(n in fresh for n in names)


_TOGETHER = "reset or keep both (a state's name means both), or say allow_bias_mismatch=True"


def refuse_mismatches(problems: list[tuple[str, str]], where: object, hint: str = _TOGETHER) -> None:
    """Raise for counts and moments that would not belong together."""
    if problems:
        raise TargetError(
            "counts and moments would not belong together: the bias correction of the next steps would be wrong",
            leaves=problems,
            where=where,
            hint=hint,
        )
