"""rename: other paths for the same leaves."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import KeyPath, Pattern, check_template, compile_pattern, expand, format_path, parse_path
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import assemble, call_text, no_match, refuse, rule_to_json

PathFunction = Callable[[str], str]


@dataclass(frozen=True, repr=False)
class Rename:
    """See `rename`."""

    rules: tuple[tuple[Pattern, Pattern], ...] = ()
    function: PathFunction | None = None
    verb: ClassVar[str] = "rename"

    __repr__ = call_text
    to_json = rule_to_json

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """A function or a mapping."""
        return [dict(self.rules) if self.function is None else self.function], {}

    def __call__(self, plan: Plan) -> Plan:
        """Rename every output that a rule matches."""
        moved = self._by_function(plan) if self.function is not None else self._by_rules(plan)
        pairs = [(output, moved.get(name, output.path)) for name, output in plan.outputs.items()]
        outputs = assemble(plan, ((path, o.expr, format_path(o.path)) for o, path in pairs), self)
        return Plan(
            plan.source, outputs, _moved_containers(plan, [(o.path, path) for o, path in pairs if path is not o.path])
        )

    def _by_rules(self, plan: Plan) -> dict[str, KeyPath]:
        moved: dict[str, KeyPath] = {}
        idle: list[Pattern] = []
        shadowed: list[Pattern] = []
        for pattern, template in self.rules:
            found = [(name, m) for name, o in plan.outputs.items() if (m := pattern.match(o.path)) is not None]
            new = [(name, m) for name, m in found if name not in moved]
            moved.update((name, expand(template, m)) for name, m in new)
            if not new:
                (shadowed if found else idle).append(pattern)
        if idle:
            raise no_match(plan.outputs, idle, self)
        refuse(
            [(pattern.text, "an earlier rule takes every leaf that it matches") for pattern in shadowed],
            self,
            "a rule renames nothing",
            "the first rule that matches a leaf renames it: put the narrower one first",
        )
        return moved

    def _by_function(self, plan: Plan) -> dict[str, KeyPath]:
        assert self.function is not None
        moved, problems = {}, []
        for name, output in plan.outputs.items():
            try:
                text = self.function(name)
                if not isinstance(text, str):
                    raise TypeError(f"it returned {text!r}")
                moved[name] = _retyped(parse_path(text), output.path)
            except Exception as error:  # the user's own code
                problems.append((name, f"{type(error).__name__}: {error}"))
        refuse(
            problems, self, "the function gives no path for these leaves", "it takes a path's text and returns another"
        )
        return {name: path for name, path in moved.items() if path != plan.outputs[name].path}

    def inverse(self) -> "Rename":
        """The rules read backwards, where each template keeps all that its pattern captures."""
        if self.function is not None:
            raise NotInvertibleError(
                "a function cannot be undone", where=repr(self), hint="rename with a mapping of patterns"
            )
        back = []
        for pattern, template in self.rules:
            if pattern.regex is not None or sorted(pattern.captures) != sorted(template.captures):
                raise NotInvertibleError(f"{template.text!r} does not keep all of {pattern.text!r}", where=repr(self))
            back.append((template, pattern))
        return Rename(tuple(back))


def rename(rules: "Mapping[str | re.Pattern[str], str] | PathFunction") -> Rename:
    """Rename leaves: a mapping of patterns to templates, or a function from a path's text to another.

    Templates use what the patterns caught: `{"params/layers_{i}/**": "model/{i}/**"}`. The first rule that matches a
    leaf renames it, the others leave it; a rule that renames nothing, and two leaves under one path, are errors.

    >>> list(ok.plan(params, ok.rename({"blocks/**": "encoder/**", "head/{x}": "out/{x}"})).outputs)
    ['encoder/bias', 'encoder/kernel', 'out/kernel']
    """
    if callable(rules):
        return Rename(function=rules)
    if not rules:
        raise TransformError("rename needs a rule", hint="rename({'params/**': 'model/**'})")
    pairs = tuple((compile_pattern(p), compile_pattern(t)) for p, t in rules.items())
    for pattern, template in pairs:
        check_template(template, pattern)
    return Rename(pairs)


def _retyped(path: KeyPath, old: KeyPath) -> KeyPath:
    """Text has no types: a segment that stood for an index in the old path still does."""
    indices = {str(segment): segment for segment in old if isinstance(segment, int)}
    names = {segment for segment in old if isinstance(segment, str)}
    return tuple(segment if segment in names else indices.get(str(segment), segment) for segment in path)


def _moved_containers(plan: Plan, moved: list[tuple[KeyPath, KeyPath]]) -> Mapping[str, str]:
    """Where inner nodes of known type went: a renamed leaf takes along the nodes around the tail that it keeps."""
    if not plan.containers or not moved:
        return plan.containers
    out = dict(plan.containers)
    for old, new in moved:
        for k in range(1, min(len(old), len(new)) + 1):
            if old[-k] != new[-k]:
                break
            kind = plan.containers.get(format_path(old[:-k]))
            if kind is not None:
                out[format_path(new[:-k])] = kind
    return out
