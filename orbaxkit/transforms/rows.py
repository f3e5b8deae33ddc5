"""place_rows: the rows of a leaf at given places of a larger (or smaller) array."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from orbaxkit.arguments import whole
from orbaxkit.errors import NotInvertibleError, TransformError, shorten
from orbaxkit.paths import Pattern, compile_pattern
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.rules import Opaque, call_text, change_each, rule_to_json

Rows = tuple[tuple[int, int], ...]  # (new place, old row), by new place


@dataclass(frozen=True, repr=False, eq=False)
class PlaceRows:
    """See `place_rows`."""

    pattern: Pattern
    rows: Rows
    into: Any
    axis: int = 0
    verb: ClassVar[str] = "place_rows"

    __repr__ = call_text
    to_json = rule_to_json

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Rows and arrays are shown by their type."""
        return [self.pattern, Opaque(dict(self.rows))], {"into": Opaque(self.into), "axis": self.axis}

    def __call__(self, plan: Plan) -> Plan:
        """Place the rows of every output that matches."""
        return change_each(plan, self.pattern, self, self._placed)

    def _placed(self, x: Expr) -> Expr:
        rest = ex.fill(np.asarray(self.into), element=x.element)
        axis = self.axis % len(x.shape) if -len(x.shape) <= self.axis < len(x.shape) else None
        if axis is None:
            raise TransformError(f"{ex.describe(x)} has no axis {self.axis}")
        if x.dtype != self.into.dtype:
            raise TransformError(f"{ex.describe(x)} goes into {self.into.dtype}: cast one of them first")
        if _without(x.shape, axis) != _without(rest.shape, axis):
            raise TransformError(f"{ex.describe(x)} does not fit into {list(rest.shape)} along axis {axis}")
        new, old = (np.array(side) for side in zip(*self.rows, strict=True))
        if new.max() >= rest.shape[axis] or old.max() >= x.shape[axis]:
            moved = f"row {old.max():,} of {x.shape[axis]:,} to place {new.max():,} of {rest.shape[axis]:,}"
            raise TransformError(f"rows go from or to where there are none: up to {moved}")
        return ex.concat(list(self._pieces(x, rest, axis)), axis)

    def _pieces(self, x: Expr, rest: Expr, axis: int) -> Iterator[Expr]:
        """Runs of rows that stay neighbours, and what lies between them."""
        at = 0
        for new, old, count in _runs(self.rows):
            if at < new:
                yield ex.slice_(rest, axis, at, new)
            yield ex.slice_(x, axis, old, old + count)
            at = new + count
        if at < rest.shape[axis]:
            yield ex.slice_(rest, axis, at, rest.shape[axis])

    def inverse(self) -> "PlaceRows":
        """Refused: rows that were left out are gone."""
        raise NotInvertibleError("rows that were not placed are not known", where=repr(self))


def place_rows(
    pattern: "str | re.Pattern[str]", rows: "Iterable[Any] | Mapping[Any, Any]", *, into: Any, axis: int = 0
) -> PlaceRows:
    """Place the rows of leaves in another array, whose other rows stay: an old vocabulary in a new embedding.

    Optimizer moments follow; where the rows of `into` stay they are zero, if their optimizer starts them so.

    Args:
        rows: the new place of each row, or a mapping from old row to new place: rows that it lacks are left out.
        into: an array of the leaf's dtype, and of its shape but for `axis`.

    >>> old, new = jnp.ones((2, 3)), jnp.zeros((4, 3))
    >>> ok.apply({"embed": old}, ok.place_rows("embed", [0, 3], into=new))["embed"].sum(1)
    Array([3., 0., 0., 3.], dtype=float32)

    Raises TransformError: two rows for one place; when applied, shapes or dtypes that differ, places that do not exist.
    """
    if not hasattr(into, "shape") or type(into).__name__ == "ShapeDtypeStruct":
        raise TransformError(f"into={type(into).__name__} is no array", hint="the target's own: target['params'][…]")
    if not isinstance(rows, (Mapping, Sequence, np.ndarray, range)) or isinstance(rows, str):
        raise TransformError(f"rows={type(rows).__name__} is neither a sequence nor a mapping", hint="range(30522)")
    pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
    placed = sorted((whole("rows", new, least=0), whole("rows", old, least=0)) for old, new in pairs)
    if not placed:
        raise TransformError("place_rows needs a row", hint="rows=range(30522) places them first, in order")
    twice = sorted({new for (new, _), (following, _) in pairwise(placed) if new == following})
    if twice:
        raise TransformError(f"two rows for one place: {', '.join(shorten(map(str, twice)))}")
    return PlaceRows(compile_pattern(pattern), tuple(placed), into, whole("axis", axis))


def _runs(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """(first new place, first old row, how many) of neighbours that stay neighbours."""
    start, count = rows[0], 0
    for new, old in rows:
        if (new, old) != (start[0] + count, start[1] + count):
            yield *start, count
            start, count = (new, old), 0
        count += 1
    yield *start, count


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
