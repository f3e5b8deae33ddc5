"""unstack and stack: between one array for all layers and one for each."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from orbaxkit.arguments import whole
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import KeyPath, Pattern, compile_pattern, format_path, is_index
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.plan import Plan
from orbaxkit.transforms.layering import (
    Item,
    columns,
    in_order,
    last_captures,
    layer_axes,
    numbered,
    refuse_gaps,
    replaced,
    stack_one,
)
from orbaxkit.transforms.rules import Problem, arguments, call_text, reason, refuse, rule_to_json
from orbaxkit.transforms.subtrees import (
    Axis,
    Subtree,
    axes_by_leaf,
    compile_axis,
    fill_template,
    find_subtrees,
    index_template,
    pattern_segments,
    without_last,
)


@dataclass(frozen=True, repr=False)
class Unstack:
    """See `unstack`."""

    pattern: Pattern
    into: Pattern
    axis: Axis = None
    block: Pattern | None = None
    remainder: Pattern | None = None
    levels: int = 1
    verb: ClassVar[str] = "unstack"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """One output for each layer of each leaf."""
        subtrees = find_subtrees(plan, self.pattern, self)
        axes = layer_axes(subtrees, self.axis, self)
        made = {subtree.path: list(self._layers(plan, subtree, axes)) for subtree in subtrees}
        return plan.with_outputs(replaced(plan, subtrees, made, self))

    def _layers(self, plan: Plan, subtree: Subtree, axes: Mapping[KeyPath, tuple[int, int] | None]) -> Iterator[Item]:
        parent = without_last(subtree.path, self.levels, self)
        count = next((found[1] for rest in subtree.leaves if (found := axes[subtree.path + rest])), None)
        if not count:
            problem = (format_path(subtree.path), "has no layers" if count == 0 else "holds no arrays")
            raise TransformError("there is nothing to unstack", leaves=[problem], where=repr(self))
        index = index_template(self.into.text, self.pattern, "into")[1]
        period, placed = (
            (1, {rest: (0, rest) for rest in subtree.leaves}) if self.block is None else self._blocks(subtree)
        )
        for layer in range(count * period):
            head = parent + fill_template(self.into, subtree.match, **{index: layer})
            for rest, output in subtree.leaves.items():
                j, tail = placed[rest]
                if layer % period == j:
                    found = axes[subtree.path + rest]
                    expr = ex.index(output.expr, found[0], layer // period) if found else output.expr
                    yield head + tail, expr, format_path(output.path)
        if self.remainder is not None:
            yield from self._remainder(plan, subtree, parent, count * period)

    def _blocks(self, subtree: Subtree) -> tuple[int, dict[KeyPath, tuple[int, KeyPath]]]:
        """Which layer of a block each leaf belongs to, and what is left of its path."""
        assert self.block is not None
        width = len(self.block.globs)
        placed, problems = {}, []
        for rest in subtree.leaves:
            match = self.block.match(rest[:width])
            number = None if match is None else str(next(iter(match.named.values())))
            if number is None or not is_index(number):
                problems.append((subtree.name_of(rest), f"is not below {self.block.text!r} with a canonical number"))
            else:
                placed[rest] = (int(number), rest[width:])
        refuse(problems, self, "leaves of a block that belong to none of its layers")
        numbers = {j for j, _ in placed.values()}
        refuse_gaps(numbers, self.block, format_path(subtree.path), self)
        return len(numbers), placed

    def _remainder(self, plan: Plan, subtree: Subtree, parent: KeyPath, first: int) -> Iterator[Item]:
        assert self.remainder is not None
        index = index_template(self.into.text, self.pattern, "into")[1]
        layers = numbered(plan, parent, self.remainder, self)
        refuse_gaps(set(layers), self.remainder, format_path(parent), self)
        for number in sorted(layers):
            head = parent + fill_template(self.into, subtree.match, **{index: first + number})
            for tail, output in layers[number].items():
                yield head + tail, output.expr, format_path(output.path)

    def inverse(self) -> "Stack":
        """The stack that undoes it; needs an axis that was named, and the number of layers in a block to be known."""
        if self.axis is None:
            hint = "name the axis: unstack(..., axis=0); or plan.inverse(), which knows it"
            raise NotInvertibleError("the axis was inferred and is not part of the rule", where=repr(self), hint=hint)
        if self.block is not None:
            raise NotInvertibleError(
                "how many layers a block has is not part of the rule", where=repr(self), hint="stack(..., period=)"
            )
        segments = pattern_segments(self.pattern)
        parent, item = segments[: -self.levels], segments[-self.levels :]
        if self.pattern.regex is not None or any("*" in s for s in item) or len(self.into.captures) > 1:
            raise NotInvertibleError(
                f"{self.into.text!r} does not keep the name of {self.pattern.text!r}", where=repr(self)
            )
        return Stack(
            compile_pattern("/".join([*parent, self.into.text])),
            compile_pattern("/".join(item)),
            self.axis,
            levels=len(self.into.globs),
        )


@dataclass(frozen=True, repr=False)
class Stack:
    """See `stack`."""

    pattern: Pattern
    into: Pattern
    axis: Axis = 0
    block: Pattern | None = None
    remainder: Pattern | None = None
    period: int | None = None
    levels: int = field(default=1, metadata={"usual": lambda rule: _levels(rule.pattern)})
    verb: ClassVar[str] = "stack"
    positional: ClassVar[tuple[str, ...]] = ("pattern",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """One output for each leaf of a layer, over all layers."""
        subtrees = find_subtrees(plan, self.pattern, self)
        families: dict[KeyPath, list[Subtree]] = {}
        for subtree in subtrees:
            families.setdefault(self._target(subtree), []).append(subtree)
        made: dict[KeyPath, list[Item]] = {}
        problems: list[Problem] = []
        for target, members in families.items():
            layers = in_order(members, self)
            made[members[0].path] = list(self._stacked(target, layers, problems))
        refuse(problems, self, "these layers cannot be stacked")
        return plan.with_outputs(replaced(plan, subtrees, made, self))

    def _target(self, subtree: Subtree) -> KeyPath:
        return without_last(subtree.path, self.levels, self) + fill_template(self.into, subtree.match)

    def _stacked(self, target: KeyPath, layers: list[Subtree], problems: list[Problem]) -> Iterator[Item]:
        period = self.period or 1
        whole = len(layers) // period * period
        if whole < len(layers) and self.remainder is None:
            problems.append(
                (
                    format_path(target),
                    f"{len(layers)} layers are not a multiple of the period {period}; remainder= takes the rest",
                )
            )
            return
        items = []
        for j in range(period if whole else 0):
            inner = target + (() if self.block is None else _number_template(self.block, j))
            items += [
                (inner + rest, exprs, origin) for rest, exprs, origin in columns(layers[j:whole:period], problems)
            ]
        axes = axes_by_leaf([path for path, _, _ in items], self.axis, self)
        for path, exprs, origin in items:
            try:
                yield path, stack_one(exprs, axes[path]), origin
            except TransformError as error:
                problems.append((format_path(path), reason(error)))
        for number, layer in enumerate(layers[whole:]):
            assert self.remainder is not None
            head = without_last(layer.path, self.levels, self) + _number_template(self.remainder, number)
            yield from ((head + rest, o.expr, format_path(o.path)) for rest, o in layer.leaves.items())

    def inverse(self) -> Unstack:
        """The unstack that undoes it."""
        segments = pattern_segments(self.pattern)
        if self.pattern.regex is not None or any("*" in s for s in segments[-self.levels :]):
            raise NotInvertibleError(
                f"{self.into.text!r} does not keep the name of {self.pattern.text!r}", where=repr(self)
            )
        return Unstack(
            compile_pattern("/".join([*segments[: -self.levels], self.into.text])),
            compile_pattern("/".join(segments[-self.levels :])),
            self.axis,
            self.block,
            self.remainder,
            levels=len(self.into.globs),
        )


def unstack(
    pattern: "str | re.Pattern[str]",
    *,
    into: str,
    axis: "int | Mapping[Any, int] | None" = None,
    block: str | None = None,
    remainder: str | None = None,
    levels: int = 1,
) -> Unstack:
    """Cut a scanned subtree into its layers: each leaf `[..., L, ...]` becomes L leaves `[...]`.

    The pattern names the subtree; its last segment becomes `into` for each layer: `unstack("params/layers",
    into="layers_{i}")` makes `params/layers_0/w`, … . A segment that is `{i}` alone becomes a sequence index.

    Args:
        axis: the layer axis of all leaves, or by pattern of the leaf's path; without one it is inferred where exactly
            one axis, counted from the front, has one same size in every leaf of the subtree.
        block: for two levels: the subtree scans blocks of several layers each, which lie below it as `block`
            (`"layers_{j}"`). Layer j of block b becomes number `b * period + j`.
        remainder: layers that lie unscanned beside the subtree (`"remainder/layers_{r}"`); they come last.
        levels: how many last segments of the pattern `into` replaces.

    Raises TransformError when applied: no or several possible axes (all are listed), leaves that disagree on how
    many layers there are.

    >>> layers = ok.restore("runs/pi0", ok.unstack("params/blocks", into="block_{i}", axis=0))
    >>> sorted(layers["params"])
    ['block_0', 'block_1', 'block_2', 'head']
    """
    compiled = compile_pattern(pattern)
    index_template(into, compiled, "into")
    return Unstack(
        compiled,
        compile_pattern(into),
        compile_axis(axis),
        None if block is None else index_template(block, None, "block")[0],
        None if remainder is None else index_template(remainder, None, "remainder")[0],
        whole("levels", levels, least=1),
    )


def stack(
    pattern: "str | re.Pattern[str]",
    *,
    into: str,
    axis: "int | Mapping[Any, int]" = 0,
    block: str | None = None,
    remainder: str | None = None,
    period: int | None = None,
    levels: int | None = None,
) -> Stack:
    """Stack layers into a scanned subtree: L leaves `[...]` become one `[..., L, ...]`; the inverse of `unstack`.

    The last segment of the pattern captures the layer's number (`stack("params/layers_{i}", into="layers")`) and
    becomes `into`; where it is nothing but `{i}`, so does the one before it (`params/layers/{i}` into `params/layers`),
    unless `levels` says how many segments do. Numbers must be canonical decimals from 0 without gaps; layers come in
    numeric order and must hold the same leaves.

    Args:
        axis: where the layer axis goes, for all leaves or by pattern of the stacked leaf's path.
        block, period: for two levels: layer `b * period + j` becomes position b of the leaves below `block` with
            number j.
        remainder: where the layers go that do not fill a block.

    >>> tree = {f"layer_{i}": {"w": jnp.full(2, i)} for i in range(3)}
    >>> ok.apply(tree, ok.stack("layer_{i}", into="layers"))["layers"]["w"].shape
    (3, 2)
    """
    compiled = compile_pattern(pattern)
    if compiled.regex is None and len(last_captures(compiled)) != 1:
        raise TransformError(
            f"the last segment of {compiled.text!r} must capture the layer's number",
            hint="stack('params/layers_{i}', into='layers')",
        )
    if (block is None) != (period is None):
        raise TransformError("block= and period= go together", hint="stack(..., block='layers_{j}', period=6)")
    return Stack(
        compiled,
        compile_pattern(into),
        compile_axis(axis),
        None if block is None else index_template(block, None, "block")[0],
        None if remainder is None else index_template(remainder, None, "remainder")[0],
        None if period is None else whole("period", period, least=1),
        levels=_levels(compiled) if levels is None else whole("levels", levels, least=1),
    )


def _levels(pattern: Pattern) -> int:
    return 2 if len(pattern.globs) > 1 and len(pattern.globs[-1]) == 1 else 1


def _number_template(template: Pattern, number: int) -> KeyPath:
    from orbaxkit.paths import Match

    return fill_template(template, Match((), {}), **{template.captures[0]: number})
