"""Leaves that are one per layer, seen as one: a tree as columns, so that layers are matched together."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orbaxkit.paths import KeyPath, format_path, is_index
from orbaxkit.specs import LeafSpec, Specs

# Fewer leaves in a block are more likely two parts of one layer (LayerNorm_0, LayerNorm_1) than layers.
_LEAST_LEAVES = 3
_NUMBERED = re.compile(r"(.*?)_?(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A leaf, or the leaves of one place in every layer: `pattern` has `{i}` for the layer's number."""

    pattern: str
    names: tuple[str, ...]  # in the order of the layers
    shape: tuple[int, ...]  # of one
    dtype: np.dtype | None
    order: int  # among the columns of its tree
    parts: tuple["Column", ...] = ()  # of columns that are taken together
    is_exact: bool = True  # whether the pattern matches these leaves alone

    @property
    def layers(self) -> int | None:
        """How many layers, of a leaf that is one per layer."""
        return len(self.names) if "{i}" in self.pattern else None


class Block(NamedTuple):
    """One of several layers: `template` has `{i}` for its number."""

    template: str
    number: int
    is_alone: bool  # whether the template finds the layers alone


def columns_of(specs: Specs) -> list[Column]:
    """The arrays of a tree; of several levels of numbered blocks, the outermost is taken for layers."""
    arrays = {name: spec for name, spec in specs.items() if spec.kind in ("array", "numpy")}
    places = {name: _place_of(specs.paths[name]) for name in arrays}
    if len(set(places.values())) < len(places):
        places = {name: specs.paths[name] for name in arrays}
    blocks = _blocks({places[name]: spec for name, spec in arrays.items()}, map(_place_of, specs.paths.values()))
    groups: dict[str, list[tuple[int, str, LeafSpec, bool]]] = {}
    for name, spec in arrays.items():
        pattern, number, is_exact = _pattern_of(name, places[name], blocks)
        groups.setdefault(pattern, []).append((number, name, spec, is_exact))
    out = []
    for order, (pattern, members) in enumerate(groups.items()):
        members.sort(key=lambda member: member[0])
        names = tuple([name for _, name, _, _ in members])
        spec, is_exact = members[0][2], all(member[3] for member in members)
        out.append(Column(pattern, names, spec.shape, spec.dtype, order, is_exact=is_exact))
    return out


def _place_of(path: KeyPath) -> KeyPath:
    """A path by its modules: Haiku writes several into one key."""
    return tuple([part for segment in path for part in str(segment).split("/") if part != "~"])


def _pattern_of(name: str, place: KeyPath, blocks: Mapping[KeyPath, Block]) -> tuple[str, int, bool]:
    """A leaf's pattern, its layer's number, and whether the pattern finds the leaf and none but layers."""
    depth = next((k for k in range(len(place)) if place[: k + 1] in blocks), None)
    if depth is None:
        return name, 0, True
    block = blocks[place[: depth + 1]]
    before, after = format_path(place[:depth]), format_path(place[depth + 1 :])
    pattern = "/".join(part for part in (before, block.template, after) if part)
    return pattern, block.number, block.is_alone and name == format_path(place) and '"' not in name


def _blocks(arrays: Mapping[KeyPath, LeafSpec], every: Iterable[KeyPath]) -> dict[KeyPath, Block]:
    """The nodes that are layers: numbered siblings, from 0 without gaps, with the same leaves inside."""
    inside: dict[KeyPath, dict[KeyPath, tuple[int, ...]]] = {}
    for path, spec in arrays.items():
        for k in range(1, len(path)):
            inside.setdefault(path[:k], {})[path[k:]] = spec.shape
    children: dict[KeyPath, set[str]] = {}
    for path in every:
        for k in range(len(path)):
            children.setdefault(path[:k], set()).add(str(path[k]))
    out = {}
    for (parent, template), nodes in _numbered(inside).items():
        alike = len({tuple(sorted(map(str, inside[node].items()))) for node in nodes.values()}) == 1
        is_large = len(inside[next(iter(nodes.values()))]) >= _LEAST_LEAVES
        if len(nodes) > 1 and sorted(nodes) == list(range(len(nodes))) and alike and is_large:
            caught = [name for name in children[parent] if name.startswith(template[: -len("{i}")])]
            is_alone = len(caught) == len(nodes) and (*parent, template.replace("{i}", "0")) in nodes.values()
            out.update({node: Block(template, number, is_alone) for number, node in nodes.items()})
    return out


def _numbered(nodes: Iterable[KeyPath]) -> dict[tuple[KeyPath, str], dict[int, KeyPath]]:
    """Siblings by the template of their names; the first of Haiku's has no number."""
    siblings: dict[tuple[KeyPath, str], dict[int, KeyPath]] = {}
    nodes = list(nodes)
    for node in nodes:
        found = _split_number(str(node[-1]))
        if found is not None:
            siblings.setdefault((node[:-1], found[0]), {})[found[1]] = node
    for node in nodes:
        others = siblings.get((node[:-1], f"{node[-1]}_{{i}}"))
        if others is not None:
            others.setdefault(0, node)
    return siblings


def _split_number(segment: str) -> tuple[str, int] | None:
    """`layers_12` as `layers_{i}` and 12."""
    found = _NUMBERED.fullmatch(segment)
    if found is None or not is_index(found[2]):
        return None
    return segment[: len(segment) - len(found[2])] + "{i}", int(found[2])


def singles(columns: Iterable[Column]) -> list[Column]:
    """Each leaf as a column of its own."""
    return [
        Column(name, (name,), column.shape, column.dtype, column.order) for column in columns for name in column.names
    ]
