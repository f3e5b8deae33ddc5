"""unreplicate: one of several equal copies."""

import re
from dataclasses import dataclass
from typing import ClassVar

from orbaxkit.arguments import whole
from orbaxkit.errors import NotInvertibleError
from orbaxkit.paths import Pattern, compile_pattern
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import arguments, call_text, change_each, rule_to_json


@dataclass(frozen=True, repr=False)
class Unreplicate:
    """See `unreplicate`."""

    pattern: Pattern
    axis: int = 0
    verb: ClassVar[str] = "unreplicate"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Take one copy of every output that matches."""
        return change_each(plan, self.pattern, self, lambda x: ex.unreplicate(x, self.axis))

    def inverse(self) -> "Unreplicate":
        """Refused: how many copies there were is not part of the rule."""
        hint = "plan.inverse() knows it"
        raise NotInvertibleError("how many copies there were is not part of the rule", where=repr(self), hint=hint)


def unreplicate(pattern: "str | re.Pattern[str]", *, axis: int = 0) -> Unreplicate:
    """Take one copy of leaves that were saved once per device (`flax.jax_utils.replicate`): `[copies, ...] -> [...]`.

    That the copies are equal, bit for bit, is checked when they are read; TransformError names the first that differs.

    >>> ok.apply({"w": jnp.ones((8, 3))}, ok.unreplicate("w"))["w"].shape
    (3,)
    """
    return Unreplicate(compile_pattern(pattern), whole("axis", axis))
