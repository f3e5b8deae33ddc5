"""Compare two checkpoints: structure, shapes, dtypes, and if asked every value."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from orbaxkit._plan import open_source
from orbaxkit.display.text import align, counted
from orbaxkit.errors import shown
from orbaxkit.execute.scanning import contents, has_bytes, jobs_of, same_window
from orbaxkit.execute.sequential import SequentialSource
from orbaxkit.execute.windows import Window
from orbaxkit.formats import Source
from orbaxkit.planning import Expr, Plan, Transform, make_plan
from orbaxkit.planning.nodes import Constant, Fill, Read
from orbaxkit.specs import LeafSpec, compare

_SHOWN = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of one leaf differ: elements that do, and by how much at most (infinite where one is NaN)."""

    name: str
    differing: int
    size: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    text: str = ""  # of scalars and strings: both values

    def __str__(self) -> str:
        if self.text:
            return self.text
        count = f"{self.differing:,} of {counted(self.size, 'element')}"
        if math.isnan(self.max_abs):
            return count
        return f"{count}, max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}"


@dataclass(frozen=True)
class Diff:
    """What differs between `a` and `b`; true where anything does. Prints well.

    `values` is None where values were not compared; else it has the leaves of equal shape and dtype whose values
    differ by more than `atol + rtol * |b|`, or in any bit where both are 0.
    """

    a: str
    b: str
    leaves: int  # that both have
    only_in_a: tuple[tuple[str, LeafSpec], ...] = ()
    only_in_b: tuple[tuple[str, LeafSpec], ...] = ()
    shapes: tuple[tuple[str, LeafSpec, LeafSpec], ...] = ()
    dtypes: tuple[tuple[str, LeafSpec, LeafSpec], ...] = ()
    values: tuple[ValueDifference, ...] | None = None
    compared: int = 0  # leaves whose values were compared
    rtol: float = 0.0
    atol: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.only_in_a or self.only_in_b or self.shapes or self.dtypes or self.values)

    def __str__(self) -> str:
        lines = [f"a  {shown(self.a)}", f"b  {shown(self.b)}"]
        lines += _section("only in a", [(name, str(spec)) for name, spec in self.only_in_a])
        lines += _section("only in b", [(name, str(spec)) for name, spec in self.only_in_b])
        lines += _section("shape differs", [(n, f"{x} in a", f"{y} in b") for n, x, y in self.shapes])
        only_dtype = [row for row in self.dtypes if row not in self.shapes]
        lines += _section("dtype differs", [(n, f"{x} in a", f"{y} in b") for n, x, y in only_dtype])
        lines += _section("values differ", [(each.name, str(each)) for each in self.values or ()])
        return "\n".join([*lines, *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        if not (self.only_in_a or self.only_in_b or self.shapes or self.dtypes):
            yield f"the same structure, shapes and dtypes: {counted(self.leaves, 'leaf', 'leaves')}"
        if self.values is None:
            yield "values were not compared (values=True, --values)"
        elif not self.values:
            how = "bit for bit" if not (self.rtol or self.atol) else f"within rtol {self.rtol:g}, atol {self.atol:g}"
            yield f"the same values, {how}: {counted(self.compared, 'leaf', 'leaves')}"

    def to_json(self) -> dict[str, Any]:
        """Plain data: every leaf that differs."""
        return {
            "a": self.a,
            "b": self.b,
            "is_equal": not self,
            "leaves_in_both": self.leaves,
            "only_in_a": [name for name, _ in self.only_in_a],
            "only_in_b": [name for name, _ in self.only_in_b],
            "shapes": [{"path": n, "a": list(x.shape), "b": list(y.shape)} for n, x, y in self.shapes],
            "dtypes": [{"path": n, "a": x.dtype_name, "b": y.dtype_name} for n, x, y in self.dtypes],
            "values": None if self.values is None else [_value_json(each) for each in self.values],
            "compared": self.compared,
            "rtol": self.rtol,
            "atol": self.atol,
        }


def _value_json(each: ValueDifference) -> dict[str, Any]:
    def finite(number: float) -> float | str:
        return number if math.isfinite(number) else str(number)

    numbers = {"differing": each.differing, "size": each.size}
    return {"path": each.name, **numbers, "max_abs": finite(each.max_abs), "max_rel": finite(each.max_rel)}


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    cells = [tuple(shown(cell) for cell in (row[0] or "(root)", *row[1:])) for row in rows[:_SHOWN]]
    lines = align(cells, [False] * len(cells[0]))
    more = [f"and {len(rows) - _SHOWN:,} more"] if len(rows) > _SHOWN else []
    return [f"{title}: {counted(len(rows), 'leaf', 'leaves')}", *(f"  {line}" for line in (*lines, *more))]


def diff(
    a: Any,
    b: Any,
    *transforms: Transform,
    values: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    step: int | None = None,
    item: str | None = None,
) -> Diff:
    """Compare two checkpoints of any format, or trees in memory. What `transforms` make of `a` is compared with `b`.

    Without `values` only metadata is read. With it, values are compared bit for bit, or to a tolerance, in a stream;
    leaves whose shapes or dtypes differ are named for that and their values left alone.

    Args:
        step, item: what to take of each of the two.

    Raises:
        CheckpointError: one of them cannot be opened or read.
        TransformError: a rule cannot be applied to the leaves of `a`.

    >>> print(ok.diff("runs/pi0/10000", "runs/pi0/20000", values=True))
    a ...
    b ...
    the same structure, shapes and dtypes: 13 leaves
    the same values, bit for bit: 11 leaves
    """
    _, source_a, path_a = open_source(a, *_choice(a, step, item))
    _, source_b, path_b = open_source(b, *_choice(b, step, item))
    plan_a, plan_b = make_plan(source_a.specs, *transforms), Plan.identity(source_b.specs)
    found = compare(plan_b.specs, plan_a.specs)
    odd = {row[0] for row in (*found.shape, *found.dtype)}
    both = [name for name in plan_a.specs if name in plan_b.specs.leaves]
    alike = [name for name in both if name not in odd]
    different = None
    if values:
        different = tuple(_Comparison(plan_a, source_a, plan_b, source_b, rtol, atol).run(alike))
    return Diff(
        path_a or "(a tree in memory)",
        path_b or "(a tree in memory)",
        len(both),
        only_in_a=tuple((name, plan_a.specs[name]) for name in found.missing),
        only_in_b=tuple((name, plan_b.specs[name]) for name in found.unexpected),
        shapes=tuple((name, x, y) for name, y, x in found.shape),
        dtypes=tuple((name, x, y) for name, y, x in found.dtype),
        values=different,
        compared=sum(plan_a.specs[name].kind != "empty" for name in alike) if values else 0,
        rtol=rtol,
        atol=atol,
    )


def _choice(side: Any, step: int | None, item: str | None) -> tuple[int | None, str | None]:
    """A step and an item mean nothing to a tree in memory."""
    is_tree = not isinstance(side, str) and not hasattr(side, "__fspath__") and not hasattr(side, "latest_step")
    return (None, None) if is_tree else (step, item)


@dataclass(frozen=True)
class _Comparison:
    plan_a: Plan
    source_a: Source
    plan_b: Plan
    source_b: Source
    rtol: float
    atol: float
    _found: dict[str, "_Tally"] = field(default_factory=dict)

    def run(self, names: Iterable[str]) -> Iterator[ValueDifference]:
        """Every leaf whose values differ, in order."""
        names = list(names)
        a, b = SequentialSource(self.source_a), SequentialSource(self.source_b)
        arrays = [name for name in names if has_bytes(self.plan_a, name)]
        with ThreadPoolExecutor(1, thread_name_prefix="orbaxkit-diff") as pool:
            for job in jobs_of(self.plan_a, arrays, a, (self.plan_b, b)):
                theirs = [same_window(window, self.plan_b) for window in job]
                pairs = _together(pool, contents(job, a), contents(theirs, b))
                for (window, x), (_, y) in pairs:
                    self._found.setdefault(window.name, _Tally()).add(x, y, self.rtol, self.atol)
        a.finish()
        b.finish()
        for name in names:
            found = self._difference(name)
            if found is not None:
                yield found

    def _difference(self, name: str) -> ValueDifference | None:
        spec = self.plan_a.specs[name]
        if spec.kind in ("scalar", "string"):
            return self._of_numbers(name)
        tally = self._found.get(name)
        if tally is None or not tally.differing:
            return None
        return ValueDifference(name, tally.differing, spec.size, tally.max_abs, tally.max_rel)

    def _of_numbers(self, name: str) -> ValueDifference | None:
        x = _number(self.plan_a.outputs[name].expr, self.source_a)
        y = _number(self.plan_b.outputs[name].expr, self.source_b)
        if isinstance(x, str) or isinstance(y, str):
            return None if x == y else ValueDifference(name, 1, 1, math.nan, math.nan, f"{x!r} in a, {y!r} in b")
        tally = _Tally()
        tally.add(np.asarray(x)[None], np.asarray(y)[None], self.rtol, self.atol)
        text = f"{np.asarray(x).item()!r} in a, {np.asarray(y).item()!r} in b"
        return ValueDifference(name, 1, 1, tally.max_abs, tally.max_rel, text) if tally.differing else None


def _number(expr: Expr, source: Source) -> Any:
    if isinstance(expr, Read):
        held = source if expr.source is None else expr.source.source
        if held.specs[expr.name].kind in ("scalar", "string"):
            return held.value(expr.name)
    if isinstance(expr, Fill) and not isinstance(expr.value, Constant):
        return expr.value
    window = Window("", expr, tuple([(0, size) for size in expr.shape]), (), 0)
    return next(contents([window], source))[1]


def _together(pool: ThreadPoolExecutor, ours: Iterator[T], theirs: Iterator[T]) -> Iterator[tuple[T, T]]:
    """Two iterators in step, the left one's next item made on another thread."""
    while True:
        pending = pool.submit(next, ours, None)
        y = next(theirs, None)
        x = pending.result()
        if x is None or y is None:
            return
        yield x, y


@dataclass
class _Tally:
    """What was found of one leaf so far."""

    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, x: np.ndarray, y: np.ndarray, rtol: float, atol: float) -> None:
        """Compare two parts of one shape."""
        if x.dtype != y.dtype:  # numbers of different widths
            x, y = x.astype(np.float64), y.astype(np.float64)
        odd = _bits(x) != _bits(y)
        odd = odd.any(-1) if odd.ndim > x.ndim else odd
        if not odd.any():
            return
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        left, right = x[odd].astype(wide), y[odd].astype(wide)
        with np.errstate(all="ignore"):
            distance = np.abs(left - right)
            distance[(left == right) | (np.isnan(left) & np.isnan(right))] = 0
            distance[np.isnan(distance)] = np.inf
            size = np.abs(right)
            relative = np.where(distance == 0, 0, np.where(size > 0, distance / size, np.inf))
            relative[np.isnan(relative)] = np.inf
            far = np.ones(distance.shape, bool)
            if rtol or atol:
                far = ~(distance <= atol + rtol * size)
                far |= np.isinf(distance)
        self.differing += int(far.sum())
        if far.any():
            self.max_abs = max(self.max_abs, float(distance[far].max()))
            self.max_rel = max(self.max_rel, float(relative[far].max()))


def _bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    if x.dtype.itemsize > 8:
        return x.view("u8").reshape(*x.shape, -1)
    return x.view(f"u{x.dtype.itemsize}")
