"""cast and affine: other values in the same layout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import Pattern, compile_pattern
from orbaxkit.planning import expressions
from orbaxkit.planning.numbers import category, dtype_of
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.transforms.rules import arguments, call_text, change_each, find, reason, refuse, rule_to_json


@dataclass(frozen=True, repr=False)
class Cast:
    """See `cast`."""

    rules: tuple[tuple[Pattern | None, np.dtype], ...]
    verb: ClassVar[str] = "cast"

    __repr__ = call_text
    to_json = rule_to_json

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """A dtype and a pattern, or a mapping."""
        if len(self.rules) > 1:
            return [dict(self.rules)], {}
        pattern, dtype = self.rules[0]
        return [dtype] if pattern is None else [dtype, pattern], {}

    def __call__(self, plan: Plan) -> Plan:
        """Cast every output by the first rule that matches it."""
        outputs, problems = dict(plan.outputs), []
        for name, dtype in self._wanted(plan).items():
            try:
                outputs[name] = Output(outputs[name].path, expressions.cast(outputs[name].expr, dtype))
            except TransformError as error:
                problems.append((name, reason(error)))
        hint = "cast('bfloat16') without a pattern takes floating-point leaves only; or narrow the pattern"
        refuse(problems, self, "cast cannot be applied to these leaves", hint)
        return plan.with_outputs(outputs)

    def _wanted(self, plan: Plan) -> dict[str, np.dtype]:
        wanted: dict[str, np.dtype] = {}
        for pattern, dtype in self.rules:
            if pattern is None:
                names = [name for name, output in plan.outputs.items() if _is_float(output.expr)]
            else:
                names = [name for name, _, _ in find(plan, pattern, self)]
            for name in names:
                wanted.setdefault(name, dtype)
        return wanted

    def inverse(self) -> "Cast":
        """Refused: the dtypes before are not known (a plan's `inverse()` knows them)."""
        raise NotInvertibleError(
            "the dtypes before the cast are not known", where=repr(self), hint="plan.inverse() knows them"
        )


@dataclass(frozen=True, repr=False)
class Affine:
    """See `affine`."""

    pattern: Pattern
    scale: float = 1.0
    shift: float = 0.0
    verb: ClassVar[str] = "affine"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Scale and shift every output that matches."""
        return change_each(plan, self.pattern, self, lambda x: expressions.affine(x, self.scale, self.shift))

    def inverse(self) -> "Affine":
        """The opposite shift and scale: exact up to rounding."""
        if self.scale == 0:
            raise NotInvertibleError("a scale of 0 cannot be undone", where=repr(self))
        return Affine(self.pattern, 1 / self.scale, -self.shift / self.scale)


def cast(dtype: "Any | Mapping[str, Any]", pattern: "str | re.Pattern[str] | None" = None) -> Cast:
    """Cast leaves: `cast("bfloat16")` all floating-point ones, `cast("float32", "params/**")` exactly those that match.

    A mapping of patterns to dtypes casts each leaf by the first pattern that matches it. Float to float rounds; into
    integers, values that do not fit (and NaN) are an error when data is read; strings, empty nodes and PRNG keys, and
    complex to real, are refused at once.

    >>> str(ok.plan("runs/pi0", ok.cast("float16", "params/**")).specs["params/head/kernel"])
    'float16[8, 2]'
    """
    if isinstance(dtype, Mapping):
        if not dtype:
            raise TransformError("cast needs a rule", hint="cast({'params/**': 'bfloat16'})")
        return Cast(tuple((compile_pattern(p), dtype_of(d)) for p, d in dtype.items()))
    return Cast(((None if pattern is None else compile_pattern(pattern), dtype_of(dtype)),))


def affine(pattern: "str | re.Pattern[str]", *, scale: int | float = 1.0, shift: int | float = 0.0) -> Affine:
    """Make `x * scale + shift` of floating-point leaves, computed in float32 or wider, rounded to their dtype.

    >>> ok.apply({"norm": jnp.zeros(2)}, ok.affine("norm", shift=1))["norm"]
    Array([1., 1.], dtype=float32)
    """
    return Affine(compile_pattern(pattern), float(scale), float(shift))


def _is_float(expr: Any) -> bool:
    return expr.element.is_numeric and expr.dtype is not None and category(expr.dtype) == "float"
