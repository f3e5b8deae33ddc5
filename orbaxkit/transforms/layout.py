"""transpose and reshape: the same elements in another order or shape."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from orbaxkit.arguments import whole, wholes
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import Pattern, compile_pattern
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import arguments, call_text, change_each, rule_to_json

_TOKEN = re.compile(r"\s*(\(|\)|[A-Za-z_]\w*|1)")
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, repr=False)
class Transpose:
    """See `transpose`."""

    pattern: Pattern
    axes: tuple[int, ...] | None = None
    verb: ClassVar[str] = "transpose"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Transpose every output that matches."""
        return change_each(plan, self.pattern, self, lambda x: ex.transpose(x, self.axes))

    def inverse(self) -> "Transpose":
        """The transpose that undoes it."""
        if self.axes is None:
            return self
        axes = tuple(a % len(self.axes) for a in self.axes)
        return Transpose(self.pattern, tuple(sorted(range(len(axes)), key=axes.__getitem__)))


@dataclass(frozen=True, repr=False)
class Reshape:
    """See `reshape`."""

    pattern: Pattern
    shape: tuple[int, ...] | str
    sizes: tuple[tuple[str, int], ...] = ()
    verb: ClassVar[str] = "reshape"

    __repr__ = call_text
    to_json = rule_to_json

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The pattern, the shape and the named sizes."""
        return [self.pattern, self.shape], dict(self.sizes)

    def __call__(self, plan: Plan) -> Plan:
        """Reshape every output that matches."""
        return change_each(plan, self.pattern, self, self._apply)

    def _apply(self, x: Expr) -> Expr:
        return rearrange(x, self.shape, dict(self.sizes)) if isinstance(self.shape, str) else ex.reshape(x, self.shape)

    def inverse(self) -> "Reshape":
        """The two sides of an axis pattern swapped; a bare shape does not say what was there before."""
        if not isinstance(self.shape, str):
            hint = "write it as an axis pattern: reshape(pattern, 'a (b c) -> a b c', b=8); or plan.inverse()"
            raise NotInvertibleError("the shape before is not part of the rule", where=repr(self), hint=hint)
        left, right = (side.strip() for side in self.shape.split("->"))
        return Reshape(self.pattern, f"{right} -> {left}", self.sizes)


def transpose(pattern: "str | re.Pattern[str]", axes: Sequence[int] | None = None) -> Transpose:
    """Permute axes: axis `k` of the result is axis `axes[k]`; without `axes` they are reversed.

    A dense kernel `[in, out]` becomes a torch weight `[out, in]`; a conv kernel HWIO becomes OIHW with `(3, 2, 0, 1)`.

    >>> ok.apply({"kernel": jnp.ones((2, 3))}, ok.transpose("kernel"))["kernel"].shape
    (3, 2)
    """
    return Transpose(compile_pattern(pattern), None if axes is None else wholes("axes", axes))


def reshape(pattern: "str | re.Pattern[str]", shape: "Sequence[int] | str", **sizes: int) -> Reshape:
    """Reshape leaves: to a shape (one size may be -1), or by axis names in einops' manner.

    `reshape("**/query/kernel", "d (n h) -> d n h", n=8)` splits an axis; `"d n h -> (n h) d"` merges and transposes.
    Sizes that the leaf's shape does not tell are given by name.

    >>> ok.apply({"w": jnp.ones((4, 6))}, ok.reshape("w", "d (n h) -> n d h", n=2))["w"].shape
    (2, 4, 3)
    """
    if isinstance(shape, str):
        parse_axes(shape)
    elif sizes:
        raise TransformError("named sizes go with an axis pattern", hint="reshape(pattern, 'd (n h) -> d n h', n=8)")
    return Reshape(
        compile_pattern(pattern),
        shape if isinstance(shape, str) else wholes("shape", shape, least=-1),
        tuple(sorted((name, whole(name, size, least=0)) for name, size in sizes.items())),
    )


@lru_cache(maxsize=1024)
def parse_axes(text: str) -> tuple[Groups, Groups]:
    """`"d (n h) -> n d h"` to the groups of axis names on both sides; the same names must stand on both."""
    sides = text.split("->")
    if len(sides) != 2:
        raise TransformError(f"the axis pattern {text!r} needs one ->", hint="'d (n h) -> d n h'")
    left, right = (_groups(side, text) for side in sides)
    names = [[name for group in side for name in group] for side in (left, right)]
    if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) < len(names[0]):
        raise TransformError(f"the axis pattern {text!r} must name each axis once on both sides")
    return left, right


def _groups(side: str, text: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    at, side = 0, side.strip()
    while at < len(side):
        token = _TOKEN.match(side, at)
        if token is None or (token[1] == "(" and inside is not None) or (token[1] == ")" and inside is None):
            raise TransformError(
                f"the axis pattern {text!r} cannot be read at {side[at:]!r}", hint="'d (n h) -> d n h'"
            )
        at = token.end()
        if token[1] == "(":
            inside = []
        elif token[1] == ")":
            groups.append(tuple(inside or ()))
            inside = None
        elif inside is not None:
            inside += [] if token[1] == "1" else [token[1]]
        else:
            groups.append(() if token[1] == "1" else (token[1],))
    if inside is not None:
        raise TransformError(f"the axis pattern {text!r} lacks a )")
    return tuple(groups)


def rearrange(x: Expr, text: str, sizes: Mapping[str, int]) -> Expr:
    """Split the axes of the left side, permute them, merge those of the right side."""
    left, right = parse_axes(text)
    known = _axis_sizes(x, left, sizes, text)
    before = [name for group in left for name in group]
    after = [name for group in right for name in group]
    split = ex.reshape(x, [known[name] for name in before])
    moved = ex.transpose(split, [before.index(name) for name in after])
    return ex.reshape(moved, [math.prod(known[name] for name in group) for group in right])


def _axis_sizes(x: Expr, left: Groups, sizes: Mapping[str, int], text: str) -> dict[str, int]:
    if len(left) != len(x.shape):
        raise TransformError(f"{ex.describe(x)} has {len(x.shape)} axes, {text!r} names {len(left)}")
    known = dict(sizes)
    unknown = sorted(set(sizes) - {name for group in left for name in group})
    if unknown:
        raise TransformError(f"{text!r} has no axis {unknown[0]!r}")
    for group, size in zip(left, x.shape, strict=True):
        open_names = [name for name in group if name not in known]
        given = math.prod(known[name] for name in group if name in known)
        if len(open_names) > 1:
            raise TransformError(
                f"the sizes of {' and '.join(open_names)} are not known", hint=f"name one: {open_names[0]}=8"
            )
        if open_names and given and size % given == 0:
            known[open_names[0]] = size // given
        elif open_names or given != size:
            raise TransformError(
                f"an axis of {size} in {ex.describe(x)} is not {' x '.join(group) or 1} with {dict(sizes)}"
            )
    return known
