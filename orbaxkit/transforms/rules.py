"""What transforms share: finding the leaves a rule means, collecting what is wrong, printing a rule as the call that made it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, Match, Pattern, compile_pattern, format_path, nearest
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Output, Plan

Patternish = "str | re.Pattern[str]"
Found = tuple[str, Output, Match]
Problem = tuple[str, str]


def call_text(rule: Any) -> str:
    """`unstack('params/layers', into='layers_{i}')`: the call that makes this transform, without what it leaves out."""
    positional = getattr(rule, "positional", ())
    shown = []
    for entry in fields(rule):
        value = getattr(rule, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if entry.name in positional:
            many = isinstance(value, tuple) and entry.name in getattr(rule, "variadic", ())
            shown += [_argument(v) for v in value] if many else [_argument(value)]
        elif value is not default and value != default:
            shown.append(f"{entry.name}={_argument(value)}")
    return f"{rule.verb}({', '.join(shown)})"


def _argument(value: Any) -> str:
    if isinstance(value, Pattern):
        return repr(value.regex) if value.regex is not None else repr(value.text)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_argument(k)}: {_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    return repr(value.name) if hasattr(value, "itemsize") and hasattr(value, "name") else repr(value)


def find(plan: Plan, pattern: Pattern, rule: Any) -> list[Found]:
    """The outputs that a pattern matches; none is an error that names the nearest ones."""
    match = pattern.match
    found = [(name, output, m) for name, output in plan.outputs.items() if (m := match(output.path)) is not None]
    if not found:
        raise no_match(plan.outputs, [pattern], rule)
    return found


def no_match(names: Iterable[str], patterns: Iterable[Pattern], rule: Any) -> TransformError:
    """The error for patterns that match nothing, with the paths or the pattern that may have been meant."""
    names, patterns = list(names), list(patterns)
    leaves = [(pattern.text, _suggestion(names, pattern)) for pattern in patterns]
    hint = next((h for h in (_subtree_hint(names, pattern) for pattern in patterns) if h), None)
    return TransformError("a pattern matches no leaf", leaves=leaves, where=call_text(rule), hint=hint)


def _suggestion(names: list[str], pattern: Pattern) -> str:
    close = nearest(pattern.text, names) or names[:3]
    return f"matches nothing; nearest are {', '.join(close)}" if close else "matches nothing; there are no leaves"


def _subtree_hint(names: list[str], pattern: Pattern) -> str | None:
    if pattern.regex is not None or not pattern.globs:
        return None
    from orbaxkit.paths import parse_path

    below = compile_pattern(f"{pattern.text}/**")
    if any(below.match(parse_path(name)) for name in names):
        return f"{pattern.text!r} is a subtree; all leaves below it are {below.text!r}"
    return None


def refuse(problems: Iterable[Problem], rule: Any, what: str, hint: str | None = None) -> None:
    """Raise one error for all offenders, if there are any."""
    problems = list(problems)
    if problems:
        raise TransformError(what, leaves=problems, where=call_text(rule), hint=hint)


def change_each(plan: Plan, pattern: Pattern, rule: Any, change: Callable[[Expr], Expr], hint: str | None = None) -> Plan:
    """Apply an operation to every output that a pattern matches, in place."""
    return change_found(plan, find(plan, pattern, rule), rule, change, hint)


def change_found(
    plan: Plan, found: Iterable[Found], rule: Any, change: Callable[[Expr], Expr], hint: str | None = None
) -> Plan:
    """Apply an operation to these outputs; every one that refuses it is named."""
    outputs, problems = dict(plan.outputs), []
    for name, output, _ in found:
        try:
            outputs[name] = Output(output.path, change(output.expr))
        except TransformError as error:
            problems.append((name, str(error)))
    refuse(problems, rule, f"{rule.verb} cannot be applied to these leaves", hint)
    return plan.with_outputs(outputs)


def assemble(plan: Plan, items: Iterable[tuple[KeyPath, Expr, str]], rule: Any) -> dict[str, Output]:
    """Outputs from paths, expressions and where they come from; two for one path, or one inside another, are refused."""
    outputs: dict[str, Output] = {}
    origins: dict[str, list[str]] = {}
    for path, expr, origin in items:
        text = format_path(path)
        outputs.setdefault(text, Output(path, expr))
        origins.setdefault(text, []).append(origin)
    twice = [(text, f"comes from {' and from '.join(names)}") for text, names in origins.items() if len(names) > 1]
    refuse(twice, rule, "two leaves would have one path")
    refuse(nested_paths(outputs), rule, "a leaf would lie inside another")
    return outputs


def nested_paths(outputs: Mapping[str, Output]) -> list[Problem]:
    """The outputs that are a leaf and have leaves inside."""
    paths = {output.path for output in outputs.values()}
    inner = {path[:k] for path in paths for k in range(len(path))}
    return [(format_path(path), "is a leaf and has leaves inside") for path in paths & inner]
