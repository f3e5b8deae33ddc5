"""What unstack and stack share: layer axes, numbered layers, putting new outputs in place of old ones."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, Pattern, format_path, is_index
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.planning.scanned import axis_candidates, candidates_text
from orbaxkit.transforms.rules import Problem, assemble, no_match, refuse
from orbaxkit.transforms.subtrees import Axis, Subtree, axes_by_leaf

Item = tuple[KeyPath, Expr, str]  # a new leaf's path, what it is, and the name of (one of) the leaves it came from


def last_captures(pattern: Pattern) -> list[str]:
    return (
        [token.name for token in pattern.globs[-1] if not isinstance(token, str) and token.name]
        if pattern.globs
        else []
    )


def layer_axes(subtrees: list[Subtree], axis: Axis, rule: Any) -> dict[KeyPath, tuple[int, int] | None]:
    """The layer axis and number of layers of each leaf, None for empty nodes, which every layer shares."""
    paths = [s.path + rest for s in subtrees for rest, o in s.leaves.items() if o.expr.kind != "empty"]
    named = axes_by_leaf(paths, axis, rule)
    axes: dict[KeyPath, tuple[int, int] | None] = {}
    problems: list[Problem] = []
    for subtree in subtrees:
        arrays = {rest: o.expr for rest, o in subtree.leaves.items() if o.expr.kind != "empty"}
        axes.update({subtree.path + rest: None for rest in subtree.leaves if rest not in arrays})
        found = _inferred(subtree, arrays, problems) if axis is None else _named(subtree, arrays, named, problems)
        axes.update({subtree.path + rest: pair for rest, pair in found.items()})
    hint = "name it: axis=0, or by leaf: axis={'**/norm': 0, '**': 1}"
    refuse(problems, rule, "the layer axis is not clear", hint)
    return axes


def _inferred(
    subtree: Subtree, arrays: Mapping[KeyPath, Expr], problems: list[Problem]
) -> dict[KeyPath, tuple[int, int]]:
    flat = [rest for rest, expr in arrays.items() if not expr.shape]
    if flat:
        problems += [(subtree.name_of(rest), f"{ex.describe(arrays[rest])} has no layer axis") for rest in flat]
        return {}
    candidates = axis_candidates(expr.shape for expr in arrays.values())
    if len(candidates) == 1:
        return dict.fromkeys(arrays, candidates[0])
    if candidates:
        problems.append((format_path(subtree.path), f"could be {candidates_text(candidates)}"))
    elif arrays:
        shapes = ", ".join(dict.fromkeys(ex.describe(expr) for expr in arrays.values()))
        problems.append((format_path(subtree.path), f"no axis has one size in every leaf: {shapes[:200]}"))
    return {}


def _named(
    subtree: Subtree, arrays: Mapping[KeyPath, Expr], named: Mapping[KeyPath, int | None], problems: list[Problem]
) -> dict[KeyPath, tuple[int, int]]:
    found: dict[KeyPath, tuple[int, int]] = {}
    for rest, expr in arrays.items():
        axis, ndim = named[subtree.path + rest], len(expr.shape)
        if axis is None:
            problems.append((subtree.name_of(rest), "no pattern names its axis"))
        elif not -ndim <= axis < ndim:
            problems.append((subtree.name_of(rest), f"{ex.describe(expr)} has no axis {axis}"))
        else:
            found[rest] = (axis % ndim, expr.shape[axis])
    counts = {count for _, count in found.values()}
    if len(counts) > 1:
        problems += [(subtree.name_of(rest), f"has {n} layers on axis {axis}") for rest, (axis, n) in found.items()]
    return found


def in_order(members: list[Subtree], rule: Any) -> list[Subtree]:
    """The layers of one family in numeric order."""
    problems, by_number = [], {}
    for member in members:
        name = last_captures(rule.pattern)[0] if rule.pattern.regex is None else list(rule.pattern.captures)[-1]
        number = str(member.match.named[name])
        if is_index(number):
            by_number[int(number)] = member
        else:
            problems.append((format_path(member.path), f"{number!r} is not a canonical number"))
    refuse(problems, rule, "these are not numbered layers", "rename or drop them first, or narrow the pattern")
    last = members[0].path[-1]
    refuse_gaps(set(by_number), rule.pattern, format_path(members[0].path[:-1]) or str(last), rule)
    return [by_number[number] for number in sorted(by_number)]


def refuse_gaps(numbers: set[int], pattern: Pattern, where: str, rule: Any) -> None:
    missing = [n for n in range(max(numbers) + 1) if n not in numbers] if len(numbers) <= max(numbers) else []
    text = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
    problem = f"{pattern.text!r} has numbers up to {max(numbers)}, but not {text}"
    refuse([(where, problem)] if missing else [], rule, "layers are missing")


def columns(layers: list[Subtree], problems: list[Problem]) -> Iterator[tuple[KeyPath, list[Expr], str]]:
    """The expressions of one leaf in every layer; layers that lack one are problems."""
    rests = dict.fromkeys(rest for layer in layers for rest in layer.leaves)
    for rest in rests:
        lacking = [layer.name_of(rest) for layer in layers if rest not in layer.leaves]
        problems += [(name, "is missing, other layers have it") for name in lacking]
        if not lacking:
            yield rest, [layer.leaves[rest].expr for layer in layers], layers[0].name_of(rest)


def stack_one(exprs: list[Expr], axis: int | None) -> Expr:
    if axis is None:
        raise TransformError("no pattern names its axis")
    empties = [expr for expr in exprs if expr.kind == "empty"]
    if len(empties) == len(exprs):
        return exprs[0]
    return ex.stack(exprs, axis)


def numbered(plan: Plan, parent: KeyPath, pattern: Pattern, rule: Any) -> dict[int, dict[KeyPath, Output]]:
    """Numbered siblings below `parent`, by number and by the rest of their leaves' paths."""
    width = len(parent) + len(pattern.globs)
    layers: dict[int, dict[KeyPath, Output]] = {}
    problems = []
    for output in plan.outputs.values():
        if output.path[: len(parent)] != parent:
            continue
        match = pattern.match(output.path[len(parent) : width])
        if match is None:
            continue
        number = str(match.named[pattern.captures[0]])
        if is_index(number):
            layers.setdefault(int(number), {})[output.path[width:]] = output
        else:
            problems.append((format_path(output.path), f"{number!r} is not a canonical number"))
    refuse(problems, rule, "these are not numbered layers")
    if not layers:
        raise no_match(plan.outputs, [pattern], rule)
    return layers


def replaced(
    plan: Plan, subtrees: Iterable[Subtree], made: Mapping[KeyPath, list[Item]], rule: Any
) -> dict[str, Output]:
    """All outputs, with new ones in place of the first leaf of each subtree that they came from."""
    place = {id(next(iter(s.leaves.values()))): s.path for s in subtrees}
    gone = {id(output) for s in subtrees for output in s.leaves.values()}
    used = {origin for items in made.values() for _, _, origin in items}
    items: list[Item] = []
    for name, output in plan.outputs.items():
        items += made.get(place.get(id(output)), [])  # type: ignore[arg-type]
        if id(output) not in gone and name not in used:
            items.append((output.path, output.expr, name))
    return assemble(plan, items, rule)
