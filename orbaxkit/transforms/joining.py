"""split and concat: between one leaf and several along an axis that they have."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from orbaxkit.arguments import whole, wholes
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import KeyPath, Pattern, check_template, compile_pattern, expand, format_path
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Expr
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.transforms.rules import (
    Problem,
    arguments,
    assemble,
    call_text,
    find,
    no_match,
    reason,
    refuse,
    rule_to_json,
)
from orbaxkit.transforms.subtrees import fill_template, name_template, pattern_segments, without_last


@dataclass(frozen=True, repr=False)
class Split:
    """See `split`."""

    pattern: Pattern
    into: tuple[Pattern, ...]
    axis: int
    sizes: tuple[int, ...] | None = None
    levels: int = 1
    verb: ClassVar[str] = "split"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Several outputs in place of each that matches."""
        found = {name: match for name, _, match in find(plan, self.pattern, self)}
        items, problems = [], []
        for name, output in plan.outputs.items():
            if name not in found:
                items.append((output.path, output.expr, name))
                continue
            try:
                parts = self._parts(output.expr)
            except TransformError as error:
                problems.append((name, reason(error)))
                continue
            heads = [
                without_last(output.path, self.levels, self) + fill_template(template, found[name])
                for template in self.into
            ]
            items += [(head, part, name) for head, part in zip(heads, parts, strict=True)]
        refuse(problems, self, "these leaves cannot be split so")
        return plan.with_outputs(assemble(plan, items, self))

    def _parts(self, x: Expr) -> list[Expr]:
        whole = ex.slice_(x, self.axis, 0, x.shape[self.axis]) if -len(x.shape) <= self.axis < len(x.shape) else None
        if whole is None:
            raise TransformError(f"{ex.describe(x)} has no axis {self.axis}")
        size, count = x.shape[self.axis], len(self.into)
        if self.sizes is None and size % count:
            raise TransformError(f"axis {self.axis} of {ex.describe(x)} does not divide by {count}", hint="sizes=[...]")
        sizes = (size // count,) * count if self.sizes is None else self.sizes
        if sum(sizes) != size:
            raise TransformError(
                f"the sizes {list(sizes)} add up to {sum(sizes)}, axis {self.axis} of {ex.describe(x)} to {size}"
            )
        starts = [sum(sizes[:k]) for k in range(count)]
        return [ex.slice_(x, self.axis, start, start + n) for start, n in zip(starts, sizes, strict=True)]

    def inverse(self) -> "Concat":
        """The concat that undoes it."""
        segments = _kept_segments(self.pattern, self.levels, self)
        parents = segments[: -self.levels]
        return Concat(
            tuple(compile_pattern("/".join([*parents, template.text])) for template in self.into),
            compile_pattern("/".join(segments[-self.levels :])),
            self.axis,
            self.sizes,
            levels=len(self.into[0].globs),
        )


@dataclass(frozen=True, repr=False)
class Concat:
    """See `concat`."""

    patterns: tuple[Pattern, ...]
    into: Pattern
    axis: int
    sizes: tuple[int, ...] | None = None
    levels: int = 1
    verb: ClassVar[str] = "concat"
    positional: ClassVar[tuple[str, ...]] = ("patterns",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """One output in place of those that the patterns match together."""
        first, rest = self.patterns[0], self.patterns[1:]
        problems: list[Problem] = []
        joined: dict[str, tuple[KeyPath, Expr]] = {}
        used: set[str] = set()
        for name, output, match in find(plan, first, self):
            names = [name, *(format_path(expand(template, match)) for template in rest)]
            lacking = [other for other in names if other not in plan.outputs]
            problems += [(other, f"is missing beside {name}") for other in lacking]
            if not lacking:
                used.update(names)
                target = without_last(output.path, self.levels, self) + fill_template(self.into, match)
                self._join(target, name, [plan.outputs[n] for n in names], joined, problems)
        problems += self._left_over(plan, used)
        refuse(problems, self, "these leaves cannot be joined")
        items = []
        for name, output in plan.outputs.items():
            if name in joined:
                items.append((*joined[name], name))
            elif name not in used:
                items.append((output.path, output.expr, name))
        return plan.with_outputs(assemble(plan, items, self))

    def _join(
        self,
        path: KeyPath,
        name: str,
        parts: list[Output],
        joined: dict[str, tuple[KeyPath, Expr]],
        problems: list[Problem],
    ) -> None:
        try:
            expr = ex.concat([part.expr for part in parts], self.axis)
            found = tuple(part.expr.shape[self.axis] for part in parts)
            if self.sizes is not None and found != self.sizes:
                raise TransformError(f"sizes are {list(found)}, not {list(self.sizes)}")
            joined[name] = (path, expr)
        except TransformError as error:
            problems.append((format_path(path), reason(error)))

    def _left_over(self, plan: Plan, used: set[str]) -> list[Problem]:
        """Leaves that a later pattern matches and that have no partner."""
        problems = []
        for pattern in self.patterns[1:]:
            names = [name for name, output in plan.outputs.items() if pattern.match(output.path) is not None]
            if not names:
                raise no_match(plan.outputs, [pattern], self)
            problems += [
                (name, f"has no partner that {self.patterns[0].text!r} matches") for name in names if name not in used
            ]
        return problems

    def inverse(self) -> Split:
        """The split that undoes it; sizes that were not named are taken to be equal only if that is said: `sizes=`."""
        if self.sizes is None:
            hint = "name them: concat(..., sizes=[...]); or plan.inverse(), which knows them"
            raise NotInvertibleError("the sizes of the parts are not part of the rule", where=repr(self), hint=hint)
        every = [_kept_segments(pattern, self.levels, self) for pattern in self.patterns]
        parents = every[0][: -self.levels]
        if any(segments[: -self.levels] != parents for segments in every):
            raise NotInvertibleError("the parts are not siblings", where=repr(self), hint="rename them first")
        into = tuple(compile_pattern("/".join(segments[-self.levels :])) for segments in every)
        whole = compile_pattern("/".join([*parents, self.into.text]))
        return Split(whole, into, self.axis, self.sizes, levels=len(self.into.globs))


def split(
    pattern: "str | re.Pattern[str]",
    *,
    into: Sequence[str],
    axis: int,
    sizes: Sequence[int] | None = None,
    levels: int = 1,
) -> Split:
    """Cut leaves along an axis into named parts, equal ones unless `sizes` says otherwise.

    The last segment of the path becomes each name, or the last `levels` segments:
    `split("**/qkv/kernel", into=["q/kernel", "k/kernel", "v/kernel"], axis=-1, levels=2)`.

    >>> tree = {"qkv": jnp.arange(6.0)}
    >>> ok.apply(tree, ok.split("qkv", into=["q", "k", "v"], axis=0))["k"]
    Array([2., 3.], dtype=float32)
    """
    into = _names(into, "split")
    parts = None if sizes is None else wholes("sizes", sizes, least=0)
    if parts is not None and len(parts) != len(into):
        raise TransformError(f"split needs one size for each of {len(into)} names, not {list(parts)}")
    compiled = compile_pattern(pattern)
    templates = tuple([name_template(name, compiled, "into") for name in into])
    return Split(compiled, templates, whole("axis", axis), parts, whole("levels", levels, least=1))


def concat(
    patterns: "Sequence[str | re.Pattern[str]]",
    *,
    into: str,
    axis: int,
    sizes: Sequence[int] | None = None,
    levels: int = 1,
) -> Concat:
    """Join leaves along an axis they have: `concat(["**/q", "**/k", "**/v"], into="qkv", axis=-1)`.

    The first pattern finds leaves; the others, filled with what it caught, name their partners. The last segment of the
    first, or its last `levels` segments, become `into`. `sizes` (checked) makes the rule invertible. A leaf without its
    partners is an error.

    >>> tree = {"q": jnp.zeros(2), "k": jnp.ones(2)}
    >>> ok.apply(tree, ok.concat(["q", "k"], into="qk", axis=0))["qk"]
    Array([0., 0., 1., 1.], dtype=float32)
    """
    if len(patterns) < 2 or isinstance(patterns, str):
        raise TransformError("concat needs two patterns or more", hint="concat(['**/q', '**/k'], into='qk', axis=-1)")
    compiled = tuple(compile_pattern(pattern) for pattern in patterns)
    for template in compiled[1:]:
        check_template(template, compiled[0])
    return Concat(
        compiled,
        name_template(into, compiled[0], "into"),
        whole("axis", axis),
        None if sizes is None else wholes("sizes", sizes, least=0),
        whole("levels", levels, least=1),
    )


def _names(into: Iterable[str], verb: str) -> list[str]:
    names = [into] if isinstance(into, str) else list(into)
    if len(names) < 2:
        raise TransformError(f"{verb} needs two names or more", hint=f"{verb}('**/qkv', into=['q', 'k', 'v'], axis=-1)")
    return names


def _kept_segments(pattern: Pattern, levels: int, rule: Split | Concat) -> list[str]:
    """The segments of a pattern whose last ones are plain text, so that they can be made again."""
    segments = pattern_segments(pattern)
    if pattern.regex is not None or any("*" in segment for segment in segments[-levels:]):
        raise NotInvertibleError(f"the last name of {pattern.text!r} is not kept", where=repr(rule))
    return segments
