"""Leaves that are one per layer, seen as one: a tree as columns, so that layers are matched together."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from orbaxkit.paths import KeyPath, format_path, is_index
from orbaxkit.specs import LeafSpec, Specs

Place = tuple[str, ...]  # a path by its modules: Haiku's quoted keys taken apart, what says nothing left out
Leaf = tuple[str, KeyPath, LeafSpec]

# Fewer leaves in a block are more likely two parts of one layer (LayerNorm_0, LayerNorm_1) than layers,
# unless its name is a number and nothing else.
_LEAST_LEAVES = 3
_NUMBERED = re.compile(r"(.*?)(\d+)")
_SILENT = "~"


@dataclass(frozen=True, eq=False)
class Column:
    """A leaf, or the leaves of one place in several layers: `place` has `{i}` for the layer's number.

    `parts`: of several leaves seen as one, because together they may be one leaf of the other tree.
    """

    place: Place
    pattern: str
    names: tuple[str, ...]  # in the order of the layers
    numbers: tuple[int, ...]  # of the layers; of a leaf of its own, none
    shape: tuple[int, ...]  # of one
    dtype: np.dtype | None
    order: int  # among the columns of its tree
    is_exact: bool = True  # whether `pattern` finds these leaves and no others
    parts: "tuple[Column, ...]" = ()

    @cached_property
    def size(self) -> int:
        """The elements of all its leaves."""
        return sum(part.size for part in self.parts) or len(self.names) * math.prod(self.shape)

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What decides how it can become another: its shape, and which layers it is of."""
        return (self.numbers, self.shape, *(part.form for part in self.parts))

    @property
    def layers(self) -> int | None:
        """How many layers, of a leaf that is in all of them."""
        return len(self.numbers) if self.numbers and self.numbers == tuple(range(len(self.numbers))) else None


def columns_of(specs: Specs, but: Iterable[str] = ()) -> list[Column]:
    """The arrays of a tree; of several levels of numbered blocks, the outermost is taken for layers."""
    left_out = set(but)
    leaves: dict[Place, Leaf] = {}
    for name, spec in specs.items():
        if spec.kind in ("array", "numpy") and name not in left_out:
            place = _place(specs.paths[name])
            leaves[(name,) if place in leaves else place] = name, specs.paths[name], spec
    is_boxed = len(leaves) > 1 and all(len(place) > 1 and place[-1] == "value" for place in leaves)  # NNX
    groups: dict[Place, list[tuple[int | None, Leaf]]] = {}
    for place, generic, number in _numbered(leaves):
        groups.setdefault(generic, []).append((number, leaves[place]))
    columns = [_column(place, order, members) for order, (place, members) in enumerate(groups.items())]
    columns = _checked(columns, specs)
    return [replace(column, place=column.place[:-1]) for column in columns] if is_boxed else columns


def singles(columns: Iterable[Column]) -> list[Column]:
    """Each leaf as a column of its own."""
    return [
        Column(_filled(column.place, number), name, (name,), (), column.shape, column.dtype, column.order)
        for column in columns
        for name, number in zip(column.names, column.numbers or (0,), strict=True)
    ]


def _place(path: KeyPath) -> Place:
    return tuple([part for segment in path for part in str(segment).split("/") if part != _SILENT]) or ("",)


def _filled(place: Place, number: int) -> Place:
    return tuple([segment.replace("{i}", str(number)) for segment in place])


def _column(place: Place, order: int, members: list[tuple[int | None, Leaf]]) -> Column:
    members.sort(key=lambda member: member[0] or 0)
    names = tuple([name for _, (name, _, _) in members])
    numbers = tuple([number for number, _ in members if number is not None])
    _, path, spec = members[0][1]
    if not numbers:
        return Column(place, names[0], names, (), spec.shape, spec.dtype, order)
    depth = _depth(place)
    text = [format_path((segment,)) for segment in path]
    if len(place) != len(path) or text[depth] != place[depth].replace("{i}", str(numbers[0])):
        return Column(place, "/".join(place), names, numbers, spec.shape, spec.dtype, order, is_exact=False)
    pattern = "/".join([*text[:depth], place[depth], *text[depth + 1 :]])
    return Column(place, pattern, names, numbers, spec.shape, spec.dtype, order)


def _checked(columns: list[Column], specs: Specs) -> list[Column]:
    """A pattern finds what its column has, and may find more: `layers_{i}` also finds `layers_extra`."""
    beside: dict[tuple[KeyPath, KeyPath], list[str]] = {}
    for depth in {_depth(column.place) for column in columns if column.numbers}:
        for path in specs.paths.values():
            if len(path) > depth:
                beside.setdefault((path[:depth], path[depth + 1 :]), []).append(str(path[depth]))

    def finds_more(column: Column) -> bool:
        depth, path = _depth(column.place), specs.paths[column.names[0]]
        base = column.place[depth].removesuffix("{i}")
        found = beside[path[:depth], path[depth + 1 :]]
        return sum(name.startswith(base) and name != base for name in found) > len(column.names)

    return [
        replace(column, is_exact=False) if column.numbers and column.is_exact and finds_more(column) else column
        for column in columns
    ]


def _depth(place: Place) -> int:
    return next((k for k, segment in enumerate(place) if "{i}" in segment), 0)


def _numbered(leaves: Mapping[Place, Leaf]) -> Iterator[tuple[Place, Place, int | None]]:
    """Each place, the same with `{i}` for its layer, and its layer's number."""
    blocks = _blocks(leaves)
    for place in leaves:
        depth = next((k for k in range(1, len(place)) if place[:k] in blocks), None)
        if depth is None:
            yield place, place, None
        else:
            template, number = blocks[place[:depth]]
            yield place, (*place[: depth - 1], template, *place[depth:]), number


def _blocks(leaves: Mapping[Place, Leaf]) -> dict[Place, tuple[str, int]]:
    """The nodes that are layers: numbered siblings, from 0 without gaps, that hold the same leaves."""
    inside: dict[Place, dict[Place, object]] = {}
    for place, (_, _, spec) in leaves.items():
        for k in range(1, len(place)):
            inside.setdefault(place[:k], {})[place[k:]] = (spec.shape, spec.dtype)
    families: dict[tuple[Place, str], dict[int, Place]] = {}
    for node in inside:
        base, number = _split_number(node[-1])
        family = families.setdefault((node[:-1], base), {})
        if number not in family or node[-1] != base.removesuffix("_"):
            family[number] = node
    out = {}
    for nodes in families.values():
        template = _template(nodes[max(nodes)][-1])
        is_whole = len(nodes) > 1 and sorted(nodes) == list(range(len(nodes)))
        if is_whole and _are_layers([inside[node] for node in nodes.values()], template == "{i}"):
            out.update({node: (template, number) for number, node in nodes.items()})
    return out


def _are_layers(nodes: list[dict[Place, object]], is_number: bool) -> bool:
    """Whether nodes have leaves in common, and what they have in common is of one shape and dtype."""
    union: dict[Place, object] = {}
    for inside in nodes:
        union.update(inside)
    is_alike = all(union[rest] == spec for inside in nodes for rest, spec in inside.items())
    has_common = any(all(rest in inside for inside in nodes) for rest in nodes[0])
    return is_alike and has_common and (is_number or len(union) >= _LEAST_LEAVES)


def _split_number(segment: str) -> tuple[str, int]:
    """`layers_12` as `layers_` and 12. Haiku numbers all but the first of a kind: `linear` is `linear_` and 0."""
    found = _NUMBERED.fullmatch(segment)
    if found is None or not is_index(found[2]):
        return f"{segment}_", 0
    return found[1], int(found[2])


def _template(segment: str) -> str:
    base, _ = _split_number(segment)
    return base + "{i}"
