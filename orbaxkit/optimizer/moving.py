"""Move a stored optimizer state into that of another optimizer: states are matched by what they hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orbaxkit.arguments import mapping
from orbaxkit.optimizer.matching import misfit
from orbaxkit.optimizer.roles import Place
from orbaxkit.optimizer.stored import StoredState, TextPath, text_path
from orbaxkit.paths import format_path, parse_path
from orbaxkit.states import StateClass
from orbaxkit.trees import Target

Problem = tuple[str, str]


@dataclass(frozen=True)
class Node:
    """One state: its leaves by field and by the rest of their paths."""

    path: TextPath
    state: StateClass
    leaves: Mapping[str, Mapping[TextPath, str]]

    def mirrors(self) -> dict[str, Mapping[TextPath, str]]:
        """The fields that follow the params, with what they mirror."""
        known = self.state.fields
        return {f: found for f, found in self.leaves.items() if f in known and known[f].layout not in ("none", "other")}

    def fields_of(self, role: str) -> list[str]:
        """The fields of a role that hold something."""
        return [name for name in self.leaves if name in self.state.fields and self.state.fields[name].role == role]

    @property
    def is_schedule(self) -> bool:
        """Whether its counts do nothing but drive schedules."""
        return self.state.label.endswith("schedule") or self.state.label == "inject_hyperparams"


@dataclass(frozen=True)
class Moves:
    """What goes where, by name: stored leaves, and counts that are given; `fresh` starts as `tx.init` makes it."""

    filled: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    new_params: dict[str, Problem] = field(default_factory=dict)  # by leaf: its path and its param
    lost_params: dict[str, Problem] = field(default_factory=dict)
    reshaped: dict[str, Problem] = field(default_factory=dict)  # by leaf: its param, and both shapes
    unmatched: list[Problem] = field(default_factory=list)  # states whose moments nothing stored has
    problems: list[Problem] = field(default_factory=list)
    mismatches: list[Problem] = field(default_factory=list)
    report: list[str] = field(default_factory=list)


def nodes_of(places: Mapping[str, Place]) -> list[Node]:
    """Leaves grouped by the state that they belong to."""
    groups: dict[TextPath, tuple[StateClass, dict[str, dict[TextPath, str]]]] = {}
    for name, place in places.items():
        leaves = groups.setdefault(place.node, (place.state, {}))[1]
        leaves.setdefault(place.field, {})[place.rest] = name
    return [Node(path, state, leaves) for path, (state, leaves) in groups.items()]


def plan_moves(
    target: Target,
    wanted: Mapping[str, Place],
    state: StoredState,
    stored: Mapping[str, Place],
    *,
    schedule_count: int | None = None,
    sources: Mapping[str, str] | None = None,
) -> Moves:
    """Decide where every leaf comes from. Problems are collected, not raised.

    `sources` names the stored state for a state of the new optimizer, both by path.
    """
    moves = Moves()
    theirs = nodes_of(stored)
    named = {text_path(parse_path(new)): text_path(parse_path(old)) for new, old in mapping("sources", sources).items()}
    counts: list[str] = []
    schedules: list[Node] = []
    for node in nodes_of(wanted):
        if node.is_schedule and not node.mirrors():
            schedules.append(node)
            continue
        source = _source(node, theirs, named, state, moves)
        if source is None:
            moves.fresh.extend(name for leaves in node.leaves.values() for name in leaves.values())
            continue
        counts += [name for f in source.fields_of("count") for name in source.leaves[f].values() if node.mirrors()]
        _move(node, source, target, state, moves)
    unknown = set(named) - {node.path for node in nodes_of(wanted)}
    moves.problems.extend((format_path(path), "is no state of tx, whatever sources= says") for path in sorted(unknown))
    _move_schedules(schedules, [n for n in theirs if n.is_schedule], counts, schedule_count, moves)
    _find_lost(wanted, state, stored, moves)
    return moves


def _source(
    node: Node, theirs: list[Node], named: Mapping[TextPath, TextPath], state: StoredState, moves: Moves
) -> Node | None:
    """The stored state that a state continues; none where it starts afresh."""
    if node.path in named:
        wanted = named[node.path]
        found = [other for other in theirs if wanted in (other.path, text_path(state.root) + other.path)]
        if not found:
            moves.problems.append((format_path(wanted), "is no stored state"))
        return found[0] if found else None
    scored = [(score, other) for other in theirs if (score := _likeness(node, other)) > (0, 0)]
    best = [other for score, other in scored if score == max(s for s, _ in scored)]
    if len(best) == 1:
        return best[0]
    if best:
        paths = ", ".join(format_path(state.root + other.path) for other in best)
        moves.problems.append((format_path(node.path), f"{node.state.label}: could continue any of {paths}"))
    elif node.fields_of("moment"):
        moves.unmatched.append((format_path(node.path), f"{node.state.label}: nothing stored has its moments"))
    return None


def _likeness(node: Node, other: Node) -> tuple[int, int]:
    """How much of a state another can fill: common mirrors with common params, then whether it is the same class."""
    is_same = node.state.name == other.state.name
    ours, theirs = node.mirrors(), other.mirrors()
    if not ours:
        return (0, int(is_same and bool(node.leaves)))
    common = [f for f in ours if f in theirs and node.state.fields[f].layout == other.state.fields[f].layout]
    shared = sum(not set(ours[f]).isdisjoint(theirs[f]) for f in common)
    return (shared, int(is_same)) if shared else (0, 0)


def _move(node: Node, source: Node, target: Target, state: StoredState, moves: Moves) -> None:
    lacking = []
    for f, leaves in node.leaves.items():
        known = node.state.fields.get(f)
        role = "scalar" if known is None else known.role
        found = _partner_field(f, role, node, source)
        if not found:
            lacking.append(f)
        for rest, name in leaves.items():
            _move_leaf(name, found.get(rest), f in node.mirrors() and bool(found), rest, target, state, moves)
    moments = [f for f in node.fields_of("moment") if not any(n in moves.filled for n in node.leaves[f].values())]
    where = format_path(node.path)
    if moments and node.fields_of("count"):
        moves.mismatches.append(
            (where, f"{', '.join(moments)} would start again under the count of {source.state.label}")
        )
    moves.report.append(f"{where or '(root)'} {node.state.label} <- {format_path(state.root + source.path)}")


def _partner_field(f: str, role: str, node: Node, source: Node) -> Mapping[TextPath, str]:
    """The stored leaves for a field: counts and mirrors by name, the rest only within one class."""
    if role == "count":
        counts = source.fields_of("count")
        return (
            source.leaves[f if f in counts or len(counts) != 1 else counts[0]]
            if f in counts or len(counts) == 1
            else {}
        )
    if f in node.mirrors():
        return source.leaves.get(f, {})
    is_argument = f in node.state.fields and node.state.fields[f].argument is not None
    return {} if node.state.name != source.state.name or is_argument else source.leaves.get(f, {})


def _move_leaf(
    name: str, stored: str | None, is_param: bool, rest: TextPath, target: Target, state: StoredState, moves: Moves
) -> None:
    problem = None if stored is None else misfit(target.leaves[name], state, stored)
    if problem is not None and stored is not None and is_param and problem.startswith("shape"):
        moves.reshaped[name] = (format_path(rest), problem)
        moves.fresh.append(name)
    elif problem is not None and stored is not None:
        moves.problems.append((stored, problem))
    elif stored is not None:
        moves.filled[name] = stored
    else:
        moves.fresh.append(name)
        if is_param:
            moves.new_params[name] = (format_path(rest), "has no moments in the checkpoint")


def _move_schedules(ours: list[Node], theirs: list[Node], counts: list[str], given: int | None, moves: Moves) -> None:
    """Counts of schedules: given, else those of as many stored schedules, else the one count beside moments."""
    for k, node in enumerate(ours):
        for f, leaves in node.leaves.items():
            for rest, name in leaves.items():
                if f not in node.fields_of("count"):
                    moves.fresh.append(name)
                elif given is not None:
                    moves.counts[name] = given
                elif len(ours) == len(theirs) and rest in theirs[k].leaves.get(f, {}):
                    moves.filled[name] = theirs[k].leaves[f][rest]
                elif len(set(counts)) == 1:
                    moves.filled[name] = counts[0]
                    moves.report.append(f"{format_path(node.path)} {node.state.label} <- the count {counts[0]}")
                else:
                    moves.problems.append(
                        (name, f"could count from {', '.join(counts) or 'nothing'}: schedule_count=…")
                    )


def _find_lost(wanted: Mapping[str, Place], state: StoredState, stored: Mapping[str, Place], moves: Moves) -> None:
    """Stored leaves that nothing continues: those of params that are gone, and fields that the optimizer lacks."""
    params = {place.rest for place in wanted.values() if place.is_mirror}
    used = set(moves.filled.values())
    unused = [name for name in state.by_path.values() if name not in used]
    for name in dict.fromkeys(unused):
        place = stored.get(name)
        if place is not None and place.is_mirror and place.rest not in params:
            moves.lost_params[name] = (format_path(place.rest), "is not among the params that tx keeps moments for")
    left = dict.fromkeys(
        format_path((*state.root, *stored[n].node, stored[n].field)) if n in stored else n
        for n in unused
        if n not in moves.lost_params
    )
    if left:
        moves.report.append(f"left behind: {', '.join(left)}")


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each once."""
    return list(dict.fromkeys(problems))
