"""select and drop: which leaves come out."""

import re
from dataclasses import dataclass
from typing import ClassVar

from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import Pattern, compile_pattern
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import arguments, call_text, no_match, rule_to_json


@dataclass(frozen=True, repr=False)
class Select:
    """See `select`."""

    patterns: tuple[Pattern, ...]
    verb: ClassVar[str] = "select"
    positional: ClassVar[tuple[str, ...]] = ("patterns",)
    is_variadic: ClassVar[bool] = True
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Keep the outputs that match."""
        kept = _matched(plan, self.patterns, self)
        return plan.with_outputs({name: output for name, output in plan.outputs.items() if name in kept})

    def inverse(self) -> "Select":
        """Refused: what was left out is not known."""
        raise NotInvertibleError("leaves that were not selected cannot be made again", where=repr(self))


@dataclass(frozen=True, repr=False)
class Drop:
    """See `drop`."""

    patterns: tuple[Pattern, ...]
    verb: ClassVar[str] = "drop"
    positional: ClassVar[tuple[str, ...]] = ("patterns",)
    is_variadic: ClassVar[bool] = True
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Leave out the outputs that match."""
        dropped = _matched(plan, self.patterns, self)
        return plan.with_outputs({name: output for name, output in plan.outputs.items() if name not in dropped})

    def inverse(self) -> "Drop":
        """Refused: what was dropped is not known."""
        raise NotInvertibleError("dropped leaves cannot be made again", where=repr(self))


def select(*patterns: "str | re.Pattern[str]") -> Select:
    """Keep only the leaves that any of the patterns matches; a pattern that matches nothing is an error.

    >>> sorted(ok.restore("runs/pi0", ok.select("params/**", "step")))
    ['params', 'step']
    """
    return Select(_compiled(patterns, "select"))


def drop(*patterns: "str | re.Pattern[str]") -> Drop:
    """Leave out the leaves that any of the patterns matches; a pattern that matches nothing is an error.

    >>> sorted(ok.restore("runs/pi0", ok.drop("opt_state/**")))
    ['params', 'step']
    """
    return Drop(_compiled(patterns, "drop"))


def _compiled(patterns: tuple, verb: str) -> tuple[Pattern, ...]:
    if not patterns:
        raise TransformError(f"{verb} needs a pattern", hint=f"{verb}('params/**')")
    return tuple(compile_pattern(pattern) for pattern in patterns)


def _matched(plan: Plan, patterns: tuple[Pattern, ...], rule: Select | Drop) -> set[str]:
    found: set[str] = set()
    idle = []
    for pattern in patterns:
        names = [name for name, output in plan.outputs.items() if pattern.match(output.path) is not None]
        found.update(names)
        if not names:
            idle.append(pattern)
    if idle:
        raise no_match(plan.outputs, idle, rule)
    return found
