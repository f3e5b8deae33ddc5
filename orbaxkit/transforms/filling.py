"""fill: leaves from elsewhere, or constants."""

import cmath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from orbaxkit.arguments import wholes
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import KeyPath, Pattern, compile_pattern, format_path, parse_path
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Element, Expr, Foreign
from orbaxkit.planning.numbers import category, dtype_of, int_range
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import Opaque, assemble, call_text, find, no_match, refuse, rule_to_json

NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, repr=False, eq=False)
class Fill:
    """See `fill`."""

    pattern: Pattern
    value: Any
    under: str = ""
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    verb: ClassVar[str] = "fill"

    __repr__ = call_text
    to_json = rule_to_json

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The pattern and the value; a tree is one argument, not a mapping of patterns."""
        options = {"under": self.under or None, "shape": self.shape, "dtype": self.dtype}
        value = self.value if isinstance(self.value, (*NUMBERS, str)) else Opaque(self.value)
        return [self.pattern, value], {name: option for name, option in options.items() if option is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fill):
            return False
        ours, theirs = ((f.pattern, f.under, f.shape, f.dtype) for f in (self, other))
        plain = (*NUMBERS, str)
        same = self.value is other.value or (
            isinstance(self.value, plain) and type(self.value) is type(other.value) and self.value == other.value
        )
        return same and ours == theirs

    def __hash__(self) -> int:
        return hash((self.pattern, self.under, self.shape, self.dtype))

    def __call__(self, plan: Plan) -> Plan:
        """Put the values in place of the outputs that match, or beside them."""
        if isinstance(self.value, (*NUMBERS, str)):
            return self._constant(plan)
        if hasattr(self.value, "shape") and hasattr(self.value, "dtype"):
            return self._array(plan)
        return self._leaves(plan)

    def _constant(self, plan: Plan) -> Plan:
        path = _plain_path(self.pattern)
        if path is not None and format_path(path) not in plan.outputs:
            return self._add(plan, {path: self._new_constant(path)})
        exprs, problems = {}, []
        for name, output, _ in find(plan, self.pattern, self):
            problem = _misfit(self.value, output.expr)
            if problem:
                problems.append((name, problem))
            exprs[output.path] = ex.fill(self.value, output.expr.shape, output.expr.element)
        refuse(problems, self, f"{self.value!r} cannot fill these leaves")
        return self._add(plan, exprs)

    def _new_constant(self, path: KeyPath) -> Expr:
        if isinstance(self.value, str):
            return ex.fill(self.value)
        if self.shape is None or self.dtype is None:
            hint = f"fill({self.pattern.text!r}, {self.value!r}, shape=(16,), dtype='float32')"
            refuse([(format_path(path), "is new and needs a shape and a dtype")], self, "no such leaf", hint)
        expr = ex.fill(self.value, self.shape, Element(self.dtype))
        problem = _misfit(self.value, expr)
        refuse([(format_path(path), problem)] if problem else [], self, f"{self.value!r} cannot fill this leaf")
        return expr

    def _array(self, plan: Plan) -> Plan:
        if type(self.value).__name__ == "ShapeDtypeStruct":
            problem = (self.pattern.text, "the value is a ShapeDtypeStruct")
            refuse([problem], self, "an abstract array is no data", "fill it with a number or an array")
        expr = _filled(self.value)
        path = _plain_path(self.pattern)
        if path is not None and format_path(path) not in plan.outputs:
            return self._add(plan, {path: expr})
        return self._add(plan, {output.path: expr for _, output, _ in find(plan, self.pattern, self)})

    def _leaves(self, plan: Plan) -> Plan:
        """From the leaves of a tree or a checkpoint: the pattern is for their paths."""
        prefix = parse_path(self.under)
        offered = {prefix + path: expr for path, expr in _offered(self.value)}
        exprs = {path: expr for path, expr in offered.items() if self.pattern.match(path) is not None}
        if not exprs:
            raise no_match([format_path(path) for path in offered], [self.pattern], self)
        names = {format_path(path) for path in exprs}
        lacking = [n for n, o in plan.outputs.items() if n not in names and self.pattern.match(o.path) is not None]
        hint = "narrow the pattern to what is given, or drop these leaves first"
        refuse([(name, "is not among the values") for name in lacking], self, "leaves without a value", hint)
        return self._add(plan, exprs)

    def _add(self, plan: Plan, exprs: dict[KeyPath, Expr]) -> Plan:
        new = {format_path(path): (path, expr) for path, expr in exprs.items()}
        items = [
            (output.path, new[name][1] if name in new else output.expr, name) for name, output in plan.outputs.items()
        ]
        items += [(path, expr, name) for name, (path, expr) in new.items() if name not in plan.outputs]
        return plan.with_outputs(assemble(plan, items, self))

    def inverse(self) -> "Fill":
        """Refused: what was there before is not known."""
        raise NotInvertibleError("what a fill replaced is not known", where=repr(self))


def fill(
    pattern: "str | re.Pattern[str]",
    value: Any,
    *,
    under: str = "",
    shape: Sequence[int] | None = None,
    dtype: Any = None,
) -> Fill:
    """Put other values in place of leaves, or add new ones.

    Args:
        pattern: which leaves; a plain path may be a new one.
        value: a number or a string (takes the place, shape and dtype of each leaf), an array, or a tree, a checkpoint
            (what `ok.open` returns) or another source with `specs` and `read`, whose leaves are taken by path.
        under: where the tree or checkpoint belongs in this one: `fill("params/head/**", head, under="params/head")`.
        shape, dtype: of a new leaf filled with a number.

    Leaves of the plan that the pattern matches and a tree or checkpoint does not have are an error.

    >>> head = {"kernel": jnp.zeros((8, 10), jnp.bfloat16)}
    >>> rules = ok.select("params/**"), ok.fill("params/head/**", head, under="params/head")
    >>> ok.restore("runs/pi0", *rules)["params"]["head"]["kernel"].shape
    (8, 10)
    """
    return Fill(
        compile_pattern(pattern),
        value,
        under,
        None if shape is None else wholes("shape", shape, least=0),
        None if dtype is None else dtype_of(dtype),
    )


def _plain_path(pattern: Pattern) -> KeyPath | None:
    if pattern.regex is not None or pattern.wildcards:
        return None
    return tuple(glob[0] for glob in pattern.globs)  # type: ignore[misc]


def _offered(value: Any) -> Iterator[tuple[KeyPath, Expr]]:
    """The leaves of a checkpoint, a source or a tree, as expressions."""
    if hasattr(value, "specs"):
        source = getattr(value, "source", value)
        foreign = Foreign(source, str(getattr(value, "path", "another source")))
        for name, spec in source.specs.leaves.items():
            yield source.specs.paths[name], ex.read(name, spec, foreign)
        return
    from orbaxkit.trees import flatten

    leaves = flatten(value).leaves
    abstract = [(name, "is abstract") for name, leaf in leaves.items() if leaf.is_abstract]
    if abstract:
        raise TransformError("an abstract array is no data", leaves=abstract, where="fill(…)")
    for leaf in leaves.values():
        yield leaf.path, _filled(leaf.value)


def _filled(value: Any) -> Expr:
    """A value in memory as it is; typed PRNG keys count keys, as they do in a checkpoint."""
    if not str(getattr(value, "dtype", "")).startswith("key<"):
        return ex.fill(value)
    import jax

    from orbaxkit.trees import spec_of

    words = jax.eval_shape(jax.random.key_data, value).shape[len(value.shape) :]
    spec = spec_of(value)
    assert spec is not None
    return ex.fill(value, element=Element(spec.dtype, "key", spec.key_impl, words))


def _misfit(value: Any, expr: Expr) -> str | None:
    """Why a constant cannot fill a leaf, or None."""
    element = expr.element
    if isinstance(value, str) != (element.kind == "string") or (not element.is_numeric and element.kind != "string"):
        return f"is {ex.describe(expr)}"
    if isinstance(value, str) or element.dtype is None:
        return None
    if isinstance(value, complex) and category(element.dtype) != "complex":
        return f"is {ex.describe(expr)}, the value is complex"
    return None if _holds(element.dtype, value) else f"is {ex.describe(expr)}, which cannot hold the value"


def _holds(dtype: np.dtype, value: bool | int | float | complex) -> bool:
    """Whether a number survives in a dtype: integers exactly, others up to rounding."""
    if category(dtype) in ("int", "bool"):
        low, high = int_range(dtype)
        return value == value and low <= value <= high and value == int(value)  # type: ignore[arg-type, operator]
    with np.errstate(over="ignore"):
        held = complex(np.asarray(value).astype(dtype).astype(np.complex128))
    if isinstance(value, int):
        return held == value
    if not cmath.isfinite(value):
        return held == value or (cmath.isnan(held) and cmath.isnan(value))
    return abs(held - value) <= abs(value) / 2  # neither overflow, nor underflow, nor the largest value instead
