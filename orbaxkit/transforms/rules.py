"""What transforms share: finding the leaves a rule means, collecting what is wrong, printing a rule as a call."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, Match, Pattern, compile_pattern, format_path, nearest, parse_path
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Output, Plan

Found = tuple[str, Output, Match]
Problem = tuple[str, str]


@dataclass(frozen=True)
class Opaque:
    """A value that is shown by its type only, and that JSON cannot hold."""

    value: Any

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def arguments(rule: Any) -> tuple[list[Any], dict[str, Any]]:
    """The call that makes a transform: its positional arguments, and the options that are not left at their default."""
    args: list[Any] = []
    options: dict[str, Any] = {}
    for entry in fields(rule):
        value, usual = getattr(rule, entry.name), entry.metadata.get("usual")
        default = entry.default if usual is None else usual(rule)
        if entry.name in rule.positional:
            args += value if rule.is_variadic else [value]
        elif value is not default and value != default:
            options[entry.name] = value
    return args, options


def call_text(rule: Any) -> str:
    """`unstack('params/layers', into='layers_{i}')`, as a person would write it."""
    args, options = rule.arguments()
    shown = [*map(_argument, args), *(f"{name}={_argument(value)}" for name, value in options.items())]
    return f"{rule.verb}({', '.join(shown)})"


def _argument(value: Any) -> str:
    match as_plain(value):
        case {"regex": text}:
            return f"re.compile({text!r})"
        case {"mapping": pairs}:
            return "{" + ", ".join(f"{_argument(k)}: {_argument(v)}" for k, v in pairs) + "}"
        case {"float": text}:
            return f"float({text!r})"
        case {"call": inner}:
            return str(inner)
        case list(items):
            return "[" + ", ".join(map(_argument, items)) + "]"
        case str() | int() | float() | complex() | None as plain:
            return repr(plain)
    return getattr(value, "__name__", None) or repr(value if isinstance(value, Opaque) else Opaque(value))


def as_plain(value: Any) -> Any:
    """An argument as JSON can hold it; what it cannot hold comes back as it is."""
    match value:
        case Pattern(text, _, None):
            return text
        case Pattern(_, _, re.Pattern() as regex):
            return {"regex": regex.pattern, "flags": int(regex.flags & ~re.UNICODE)}
        case np.dtype():
            return value.name
        case Mapping():
            return {"mapping": [[as_plain(k), as_plain(v)] for k, v in value.items()]}
        case tuple() if value and all(isinstance(v, tuple) and isinstance(v[0], Pattern) for v in value):
            return as_plain(dict(value))
        case tuple() | list():
            return [as_plain(v) for v in value]
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case _ if hasattr(value, "verb"):
            return {"call": value}
    return value


def rule_to_json(rule: Any) -> dict[str, Any]:
    """A transform as plain JSON data (`transforms.from_json` reads it back).

    Raises TransformError: it holds a function, an array, a tree or a checkpoint, which JSON cannot; named.
    """
    args, options = rule.arguments()
    problems: list[Problem] = []
    out = {
        "transform": rule.verb,
        "args": [_json_value(as_plain(arg), rule, problems) for arg in args],
        "options": {name: _json_value(as_plain(value), rule, problems) for name, value in options.items()},
    }
    refuse(problems, rule, "a transform that JSON cannot hold", "build it in code, where the value is at hand")
    return out


def _json_value(value: Any, rule: Any, problems: list[Problem]) -> Any:
    if isinstance(value, dict) and "call" in value:
        return rule_to_json(value["call"])
    if isinstance(value, dict):
        return {key: _json_value(entry, rule, problems) for key, entry in value.items()}
    if isinstance(value, list):
        return [_json_value(entry, rule, problems) for entry in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    name = getattr(value, "__qualname__", None)
    problems.append((rule.verb, f"holds the function {name}" if callable(value) and name else f"holds {value!r}"))
    return None


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
    return TransformError("a pattern matches no leaf", leaves=leaves, where=repr(rule), hint=hint)


def _suggestion(names: list[str], pattern: Pattern) -> str:
    pool = _subtrees(names) if pattern.text.endswith("/**") else names
    close = nearest(pattern.text, pool) or names[:3]
    return f"matches nothing; nearest are {', '.join(close)}" if close else "matches nothing; there are no leaves"


def _subtrees(names: list[str]) -> list[str]:
    """The pattern for each inner node."""
    paths = map(parse_path, names)
    return [
        f"{format_path(node)}/**" for node in dict.fromkeys(path[:k] for path in paths for k in range(1, len(path)))
    ]


def _subtree_hint(names: list[str], pattern: Pattern) -> str | None:
    if pattern.regex is not None or not pattern.globs:
        return None
    below = compile_pattern(f"{pattern.text}/**")
    if any(below.match(parse_path(name)) for name in names):
        return f"{pattern.text!r} is a subtree; all leaves below it are {below.text!r}"
    return None


def refuse(problems: Iterable[Problem], rule: Any, what: str, hint: str | None = None) -> None:
    """Raise one error for all offenders, if there are any."""
    problems = list(problems)
    if problems:
        raise TransformError(what, leaves=problems, where=repr(rule), hint=hint)


def reason(error: TransformError) -> str:
    """What an error says, without its hint."""
    return str(error).split("\n")[0]


def change_each(
    plan: Plan, pattern: Pattern, rule: Any, change: Callable[[Expr], Expr], hint: str | None = None
) -> Plan:
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
            problems.append((name, reason(error)))
    refuse(problems, rule, f"{rule.verb} cannot be applied to these leaves", hint)
    return plan.with_outputs(outputs)


def assemble(plan: Plan, items: Iterable[tuple[KeyPath, Expr, str]], rule: Any) -> dict[str, Output]:
    """Outputs from paths, expressions and origins; two for one path, or one inside another, are refused."""
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
