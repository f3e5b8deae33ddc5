"""Subtrees that a pattern names, their templates, and axes given per leaf."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orbaxkit.arguments import whole
from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, Match, Pattern, Wildcard, compile_pattern, expand, format_path
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.transforms.rules import no_match

Axis = int | tuple[tuple[Pattern, int], ...] | None


@dataclass
class Subtree:
    """A node that a pattern matches, and the outputs below it by what is left of their paths."""

    path: KeyPath
    match: Match
    leaves: dict[KeyPath, Output] = field(default_factory=dict)

    def name_of(self, rest: KeyPath) -> str:
        """The text of a leaf's whole path."""
        return format_path(self.path + rest)


def find_subtrees(plan: Plan, pattern: Pattern, rule: Any) -> list[Subtree]:
    """The outermost nodes (or leaves) that a pattern matches; none is an error."""
    known: dict[KeyPath, Subtree | None] = {}
    for output in plan.outputs.values():
        path = output.path
        for k in range(len(path) + 1):
            prefix = path[:k]
            if prefix not in known:
                match = pattern.match(prefix)
                known[prefix] = None if match is None else Subtree(prefix, match)
            subtree = known[prefix]
            if subtree is not None:
                subtree.leaves[path[k:]] = output
                break
    found = [subtree for subtree in known.values() if subtree is not None]
    if not found:
        raise no_match(_nodes(plan), [pattern], rule)
    return found


def _nodes(plan: Plan) -> list[str]:
    paths = dict.fromkeys(o.path[:k] for o in plan.outputs.values() for k in range(1, len(o.path) + 1))
    return [format_path(path) for path in paths]


def index_template(text: str, given: Pattern | None, what: str) -> tuple[Pattern, str]:
    """A template with one capture of its own, the layer index, besides those that `given` captures; and its name."""
    template = compile_pattern(text)
    own = [name for name in template.captures if given is None or name not in given.captures]
    if len(own) != 1 or any(not token.name for token in template.wildcards):
        raise TransformError(
            f"{what}={text!r} must have one {{i}} for the layer's number", hint=f"{what}='layers_{{i}}'"
        )
    return template, own[0]


def name_template(text: str, given: Pattern, what: str) -> Pattern:
    """A template that needs nothing but what `given` captures."""
    template = compile_pattern(text)
    unknown = [token for token in template.wildcards if token.name not in given.captures or not token.name]
    if unknown:
        token = f"{{{unknown[0].name}}}" if unknown[0].name else unknown[0].kind
        raise TransformError(f"{what}={text!r} has a {token} that {given.text!r} does not capture")
    return template


def without_last(path: KeyPath, levels: int, rule: Any) -> KeyPath:
    """A path without its last `levels` segments."""
    if levels > len(path):
        problem = f"has {len(path)} segments, levels={levels}"
        raise TransformError("a path is too short", leaves=[(format_path(path), problem)], where=repr(rule))
    return path[: len(path) - levels]


def fill_template(template: Pattern, match: Match, **named: int) -> KeyPath:
    """A template with what the pattern captured and numbers of ours; a segment that is one number is an index."""
    return expand(template, Match((), {**match.named, **named}))


def pattern_segments(pattern: Pattern) -> list[str]:
    """The text of each segment of a glob."""
    return ["".join(_token_text(token, len(glob)) for token in glob) for glob in pattern.globs]


def _token_text(token: "str | Wildcard", count: int) -> str:
    if isinstance(token, str):
        return format_path((token,)) if count == 1 else token
    return f"{{{token.name}}}" if token.name else token.kind


def compile_axis(axis: "int | Mapping[Any, int] | None") -> Axis:
    """An axis for all leaves, or by pattern."""
    if isinstance(axis, Mapping):
        return tuple((compile_pattern(pattern), whole("axis", a)) for pattern, a in axis.items())
    return None if axis is None else whole("axis", axis)


def axes_by_leaf(paths: Iterable[KeyPath], axis: Axis, rule: Any) -> dict[KeyPath, int | None]:
    """The axis named for each leaf, by the first pattern that matches it; None where no pattern does."""
    paths = list(paths)
    if not isinstance(axis, tuple):
        return dict.fromkeys(paths, axis)
    axes: dict[KeyPath, int | None] = dict.fromkeys(paths)
    idle = []
    for pattern, number in axis:
        found = [path for path in paths if pattern.match(path) is not None]
        if not found:
            idle.append(pattern)
        for path in found:
            if axes[path] is None:
                axes[path] = number
    if idle:
        raise no_match([format_path(path) for path in paths], idle, rule)
    return axes
