"""What a recipe is: rows that say which leaf becomes which, in what layout; checked leaf by leaf before it runs."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from orbaxkit.display.text import align
from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, Match, Pattern, compile_pattern, expand, format_path, is_index, nearest, parse_path
from orbaxkit.planning.mirrors import apply_transform
from orbaxkit.planning.plan import Plan, Transform
from orbaxkit.slots import EMA_NAMES, is_optimizer_name
from orbaxkit.transforms import rename, reshape, unstack
from orbaxkit.transforms.layout import parse_axes

Problem = tuple[str, str]
# Transforms that a plan needs, given the node that holds its params.
Steps = Callable[[Plan, KeyPath], Iterable[Transform]]

_CAPTURE = re.compile(r"\{\w+\}")


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf, or one for each layer `{i}`: what it is called on both sides, and its axes where they move.

    The rows of a `group` are there all or not at all; those without one always are.
    """

    origin: str
    goal: str
    layout: str = ""  # an axis pattern: "i o -> o i"
    group: str = ""

    def turned(self) -> "Row":
        """The way back."""
        left, arrow, right = self.layout.partition("->")
        return Row(self.goal, self.origin, f"{right.strip()} -> {left.strip()}" if arrow else "", self.group)


@dataclass(frozen=True, slots=True)
class Cut:
    """Leaves that are several in one: after `layout`, position j of the first axis becomes the leaf `into` of the rest.

    For a subtree that is scanned, or a leaf. `sizes` are those of axes that the layout splits.
    """

    pattern: str
    into: str
    layout: str = ""
    sizes: tuple[tuple[str, int], ...] = ()

    def steps(self, root: KeyPath) -> list[Any]:
        """The transforms."""
        where = _below(root, self.pattern)
        cut = [unstack(where, into=self.into, axis=0)]
        return [reshape(where, self.layout, **dict(self.sizes)), *cut] if self.layout else cut


def no_steps(plan: Plan, root: KeyPath) -> Iterable[Transform]:
    """What most recipes need beside their rows."""
    return ()


def no_sizes(plan: Plan, root: KeyPath) -> Mapping[str, int]:
    """Where every merged axis goes unsplit."""
    return {}


@dataclass(frozen=True, repr=False)
class Recipe:
    """See `recipe`. Paths in `rows` and `cuts` begin at the node that holds the params.

    Where a recipe goes back, its rows are turned, and the rest stays as it was written for the way there.
    """

    name: str
    origin: str
    goal: str
    rows: tuple[Row, ...]
    origin_root: str = ""  # where the params lie in what the way back makes
    goal_root: str = ""  # and in what the way there makes
    cuts: tuple[Cut, ...] = ()  # before the rows on the way there
    mixed: frozenset[str] = frozenset()  # the groups that some layers have and others not
    keeps_others: bool = False  # params that no row knows keep their names, else they are refused
    beside: tuple[str, ...] = ()  # nodes that go along with the one that holds the params
    arrive: Steps = no_steps  # before all else on the way there
    leave: Steps = no_steps  # after all else on the way back
    sizes: Callable[[Plan, KeyPath], Mapping[str, int]] = no_sizes  # of axes that rows split, by name
    hints: Mapping[str, str] = field(default_factory=dict)  # for leaves without a row, by part of their path
    options: Mapping[str, Any] = field(default_factory=dict)  # as they were given
    part: Pattern | None = None  # the leaves that a slice is about
    is_inverse: bool = False
    verb: ClassVar[str] = "recipe"

    def __call__(self, plan: Plan) -> Plan:
        """Map every param; optimizer slots follow, and what is neither stays.

        Raises TransformError: params that no row knows, rows whose leaf is missing, two leaves for one name.
        """
        if not self.is_inverse:
            plan = _applied(plan, self.arrive(plan, self._root(plan)))
        root = self._root(plan)
        at = parse_path(self.goal_root) if self.part is None else root  # a slice maps its leaves where they are
        self._refuse_others(plan, root)
        plan = self._moved(plan, root, at)
        if not self.is_inverse:
            return self._mapped(self._cut(plan, at), at)
        plan = self._joined(self._mapped(plan, at), at)
        return _applied(plan, self.leave(plan, at))

    def inverse(self) -> "Recipe":
        """The recipe for the way back."""
        return replace(
            self,
            origin=self.goal,
            goal=self.origin,
            rows=tuple([row.turned() for row in self.rows]),
            origin_root=self.goal_root,
            goal_root=self.origin_root,
            is_inverse=not self.is_inverse,
        )

    def __getitem__(self, pattern: str) -> "Recipe":
        """A slice: the rows whose origin matches a pattern. Every other leaf stays as it is."""
        part = compile_pattern(pattern)
        rows = tuple([row for row in self.rows if part.match(_example(row.origin)) is not None])
        if not rows:
            known = [format_path(_example(row.origin)) for row in self.rows]
            hint = f"nearest are {', '.join(nearest(pattern, known) or known[:3])}"
            raise TransformError(f"{pattern!r} matches no row of {self!r}", hint=hint)
        return replace(self, rows=rows, part=part)

    def to_json(self) -> dict[str, Any]:
        """Refused: a recipe goes by its name, and looks at the leaves; the plan that it makes can be written."""
        hint = f"ok.plan(path, ok.recipe({self.name!r})).to_json()"
        raise TransformError("a recipe is code, which JSON cannot hold", where=repr(self), hint=hint)

    def __repr__(self) -> str:
        part = "" if self.part is None else f"[{self.part.text!r}]"
        options = "".join([f", {name}={value!r}" for name, value in self.options.items()])
        return f"recipe({self.name!r}{options}){'.inverse()' if self.is_inverse else ''}{part}"

    def __str__(self) -> str:
        rows = [(row.origin, "->", row.goal, row.layout, row.group) for row in self.rows]
        return "\n".join([f"{self.origin} -> {self.goal}", *align(rows, [False] * 5)])

    def _firsts(self) -> set[str]:
        return {_first(row.origin) for row in self.rows}

    def _root(self, plan: Plan) -> KeyPath:
        """The node that holds the params: where the first names of the rows are."""
        firsts, beside = self._firsts(), {(name,) for name in self.beside}
        roots: dict[KeyPath, str] = {}
        for name, output in plan.outputs.items():
            depth = next((k for k, segment in enumerate(output.path) if _first(segment) in firsts), None)
            outer = output.path[:depth]
            if depth is not None and outer[-1:] not in beside and not any(map(is_optimizer_name, outer)):
                roots.setdefault(outer, name)
        if len(roots) == 1:
            return next(iter(roots))
        if roots:
            leaves = [(format_path(root), f"holds {name}") for root, name in roots.items()]
            named = [format_path(root) for root in roots if root]
            hint = (
                f"choose one first: ok.select('{named[0]}/**')" if len(named) == len(roots) else "drop the others first"
            )
            raise TransformError(f"several nodes hold params of {self.origin}", leaves=leaves, hint=hint)
        hint = self._hint(plan, f"the names begin with {', '.join(sorted(firsts))}")
        raise TransformError(f"this holds no params of {self.origin}", where=repr(self), hint=hint)

    def _hint(self, plan: Plan, otherwise: str) -> str:
        """The way back, where the plan looks like the other side."""
        others = {_first(row.goal) for row in self.rows} - self._firsts()
        if any(_first(segment) in others for output in plan.outputs.values() for segment in output.path):
            return f"it looks like {self.goal}: {self.inverse()!r}"
        return otherwise

    def _not_the_leaves(self, plan: Plan, leaves: list[Problem], hint: str) -> TransformError:
        what = f"these are not the leaves of {self.origin}"
        return TransformError(what, leaves=leaves, where=repr(self), hint=self._hint(plan, hint))

    def _refuse_others(self, plan: Plan, root: KeyPath) -> None:
        """Arrays beside the params that are no optimizer's, no average and no step: heads that no row knows."""
        if self.keeps_others or self.part is not None:
            return
        firsts, others = self._firsts(), []
        for name, output in plan.outputs.items():
            inner = output.path[len(root) :]
            if output.path[: len(root)] != root or _first(inner[0] if inner else "") in firsts:
                continue
            is_told = any(is_optimizer_name(segment) or segment in EMA_NAMES for segment in inner)
            is_array = output.expr.kind in ("array", "numpy") and output.expr.shape
            if is_array and not is_told and inner[0] not in self.beside:
                others.append((name, self._unknown(inner)))
        if others:
            hint = "leave them out with ok.drop, or convert them on their own; moments beside them go too"
            raise self._not_the_leaves(plan, others, hint)

    def _moved(self, plan: Plan, root: KeyPath, at: KeyPath) -> Plan:
        if root == at:
            return plan
        present = {output.path[len(root)] for output in plan.outputs.values() if output.path[: len(root)] == root}
        firsts = [first for first in present if _first(first) in self._firsts()]
        rules: dict[Any, str] = {
            f"{format_path((*root, first))}/**": f"{format_path((*at, first))}/**" for first in firsts
        }
        return apply_transform(rename(rules), plan)

    def _cut(self, plan: Plan, root: KeyPath) -> Plan:
        """What is several leaves in one, cut."""
        for cut in self._cuts_at_hand():
            steps = cut.steps(root)
            plan = _applied(plan, steps if _matches_any(plan, steps[-1].pattern) else ())
        return plan

    def _joined(self, plan: Plan, root: KeyPath) -> Plan:
        for cut in reversed(self._cuts_at_hand()):
            steps = [step.inverse() for step in reversed(cut.steps(root))]
            plan = _applied(plan, steps if _matches_any(plan, steps[0].pattern) else ())
        return plan

    def _cuts_at_hand(self) -> list[Cut]:
        """Those that rows at hand are about."""
        names = [_example(row.goal if self.is_inverse else row.origin) for row in self.rows]
        made = {cut: _example("/".join([*cut.pattern.split("/")[:-1], cut.into])) for cut in self.cuts}
        return [cut for cut, path in made.items() if any(name[: len(path)] == path for name in names)]

    def _mapped(self, plan: Plan, root: KeyPath) -> Plan:
        """Lay out and rename each param by its row."""
        found = self._assigned(plan, root)
        sizes = self.sizes(plan, root)
        for row in dict.fromkeys(row for row, _ in found.values() if row.layout):
            split = {name for group in parse_axes(row.layout)[0] if len(group) > 1 for name in group}
            own = {name: size for name, size in sizes.items() if name in split}
            plan = apply_transform(reshape(_below(root, row.origin), row.layout, **own), plan)
        goals = {
            name: format_path((*root, *expand(compile_pattern(row.goal), match)))
            for name, (row, match) in found.items()
        }
        return apply_transform(rename(lambda name: goals.get(name, name)), plan)

    def _assigned(self, plan: Plan, root: KeyPath) -> dict[str, tuple[Row, Match]]:
        """The row of each param. Raises TransformError: params without a row, rows without a param; all are named."""
        patterns = [(row, compile_pattern(row.origin)) for row in self.rows]
        found: dict[str, tuple[Row, Match]] = {}
        problems: list[Problem] = []
        for name, inner in self._params(plan, root):
            own = next(((row, match) for row, pattern in patterns if (match := pattern.match(inner)) is not None), None)
            if own is not None:
                found[name] = own
            elif not self.keeps_others:
                problems.append((name, self._unknown(inner)))
        problems += [(format_path((*root, *path)), told) for path, told in self._missing(found)]
        if problems:
            hint = "leave out what is not wanted with ok.drop, rename what is called otherwise, before the recipe"
            raise self._not_the_leaves(plan, problems, hint)
        return found

    def _params(self, plan: Plan, root: KeyPath) -> Iterator[tuple[str, KeyPath]]:
        """The leaves that the recipe has to map, and their paths below `root`."""
        firsts, rows = self._firsts(), [compile_pattern(row.origin) for row in self.rows]
        for name, output in plan.outputs.items():
            inner = output.path[len(root) :]
            is_param = output.path[: len(root)] == root and inner and _first(inner[0]) in firsts
            if is_param and (self.part is None or any(row.match(inner) is not None for row in rows)):
                yield name, inner

    def _missing(self, found: Mapping[str, tuple[Row, Match]]) -> Iterator[tuple[KeyPath, str]]:
        """Rows without a leaf, and layers that lack a leaf which others have."""
        numbers: dict[Row, set[int]] = {row: set() for row in self.rows if "*" not in row.origin}
        for row, match in found.values():
            if row in numbers:
                numbers[row].add(int(match.named.get("i") or 0))
        groups = {row.group for row, _ in found.values()}
        layers: dict[Any, set[int]] = {}
        for row, those in numbers.items():
            layers.setdefault(_family(row), set()).update(those)
            layers.setdefault((_family(row), row.group), set()).update(those)
        for row, those in numbers.items():
            if row.group and row.group not in groups:
                continue
            wanted = set(range(max(layers[_family(row)], default=0) + 1))
            if row.group in self.mixed:
                wanted = layers[_family(row), row.group]
            told = "is missing, other layers have it" if those else "is missing"
            yield from ((parse_path(row.origin.replace("{i}", str(n))), told) for n in sorted(wanted - those))

    def _unknown(self, inner: KeyPath) -> str:
        text = format_path(inner)
        known = next((told for part, told in self.hints.items() if part in text), None)
        generic = "/".join("{i}" if is_index(str(segment)) else str(segment) for segment in inner)
        close = nearest(generic, [row.origin for row in self.rows], 1)
        return known or f"no row knows it{f', nearest is {close[0]}' if close else ''}"


def _first(segment: Any) -> str:
    """The first part of a name: Haiku's modules are paths in one key."""
    return str(segment).split("/")[0]


def _family(row: Row) -> str:
    """What the rows of the same layers have in common: all that stands before the layer's number."""
    before, capture, _ = row.origin.partition("{i}")
    return before if capture else row.origin


def _example(pattern: str) -> KeyPath:
    """A path that a row's pattern matches."""
    return parse_path(_CAPTURE.sub("0", pattern))


def _below(root: KeyPath, pattern: str) -> str:
    return f"{format_path(root)}/{pattern}" if root else pattern


def _applied(plan: Plan, steps: Iterable[Transform]) -> Plan:
    for step in steps:
        plan = apply_transform(step, plan)
    return plan


def _matches_any(plan: Plan, pattern: Pattern) -> bool:
    depth = len(pattern.globs)
    return any(pattern.match(output.path[:depth]) is not None for output in plan.outputs.values())
