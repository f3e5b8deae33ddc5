"""Leaves that are one per layer, seen as one: a tree as columns, so that layers are matched together."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from orbaxkit.paths import KeyPath, format_path, is_index
from orbaxkit.specs import LeafSpec, Specs

# Fewer leaves in a block are more likely two parts of one layer (LayerNorm_0, LayerNorm_1) than layers.
_LEAST_LEAVES = 3
_NUMBERED = re.compile(r"(.*?)_?(\d+)")


@dataclass(frozen=True, slots=True)
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


def columns_of(specs: Specs) -> list[Column]:
    """The arrays of a tree; of several levels of numbered blocks, the outermost is taken for layers."""
    arrays = {specs.paths[name]: (name, spec) for name, spec in specs.items() if spec.kind in ("array", "numpy")}
    groups: dict[str, list[tuple[int, str, LeafSpec]]] = {}
    for path, pattern, number in _numbered(arrays):
        name, spec = arrays[path]
        groups.setdefault(pattern, []).append((number, name, spec))
    out = []
    for order, (pattern, members) in enumerate(groups.items()):
        members.sort(key=lambda member: member[0])
        _, _, spec = members[0]
        out.append(Column(pattern, tuple(name for _, name, _ in members), spec.shape, spec.dtype, order))
    return out


def _numbered(arrays: Mapping[KeyPath, tuple[str, LeafSpec]]) -> Iterator[tuple[KeyPath, str, int]]:
    """Each path with its pattern and its layer's number."""
    blocks = _blocks(arrays)
    for path in arrays:
        depth = next((k for k in range(len(path)) if path[: k + 1] in blocks), None)
        if depth is None:
            yield path, format_path(path), 0
        else:
            template, number = blocks[path[: depth + 1]]
            before, after = format_path(path[:depth]), format_path(path[depth + 1 :])
            yield path, "/".join(part for part in (before, template, after) if part), number


def _blocks(arrays: Mapping[KeyPath, tuple[str, LeafSpec]]) -> dict[KeyPath, tuple[str, int]]:
    """The nodes that are layers: numbered siblings, from 0 without gaps, with the same leaves inside."""
    inside: dict[KeyPath, dict[KeyPath, tuple[int, ...]]] = {}
    for path, (_, spec) in arrays.items():
        for k in range(1, len(path)):
            inside.setdefault(path[:k], {})[path[k:]] = spec.shape
    siblings: dict[tuple[KeyPath, str], dict[int, KeyPath]] = {}
    for node in inside:
        found = _split_number(str(node[-1]))
        if found is not None:
            siblings.setdefault((node[:-1], found[0]), {})[found[1]] = node
    out = {}
    for (_, template), nodes in siblings.items():
        alike = len({tuple(sorted(map(str, inside[node].items()))) for node in nodes.values()}) == 1
        is_large = len(next(iter(map(inside.get, nodes.values()))) or ()) >= _LEAST_LEAVES
        if len(nodes) > 1 and sorted(nodes) == list(range(len(nodes))) and alike and is_large:
            out.update({node: (template, number) for number, node in nodes.items()})
    return out


def _split_number(segment: str) -> tuple[str, int] | None:
    """`layers_12` as `layers_{i}` and 12. Quoted names have no wildcards in patterns, so they are not taken."""
    if "/" in segment:
        return None
    found = _NUMBERED.fullmatch(segment)
    if found is None or not is_index(found[2]):
        return None
    return segment[: len(segment) - len(found[2])] + "{i}", int(found[2])


def singles(columns: Iterable[Column]) -> list[Column]:
    """Each leaf as a column of its own."""
    return [
        Column(name, (name,), column.shape, column.dtype, column.order) for column in columns for name in column.names
    ]
