"""How the axes of one shape can become those of another."""

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from orbaxkit.matching.columns import Column

_AXIS = re.compile(r"\([^)]*\)|\S+")
# Axis patterns that weights are stored in, by how many axes there are on both sides; merged axes go both ways.
_PATTERNS = (
    "i o -> o i",
    "h w i o -> o i h w",
    "k i o -> o i k",
    "1 p d -> p d",
    "1 1 1 c -> c",
    "n h -> (n h)",
    "d n h -> (n h) d",
    "n d h -> (n h) d",
    "n h d -> d (n h)",
    "n h d -> (n h) d",
    "d n h -> d (n h)",
    "1 d h -> h d",
)


class Cut(NamedTuple):
    """Where a leaf is cut into parts, or joined from them."""

    axis: int  # of one layer
    sizes: tuple[int, ...]


@lru_cache(maxsize=65536)
def layouts(found: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[str, ...]:
    """The axis patterns that turn one shape into the other, "" where they are equal; the plain ones first."""
    same = [""] if found == wanted else []
    there = [pattern for pattern in _PATTERNS if _fits(pattern, found, wanted)]
    known = {_meaning(pattern) for pattern in there}
    turned = [turn(pattern) for pattern in _PATTERNS if _fits(pattern, wanted, found)]
    back = [pattern for pattern in turned if _meaning(pattern) not in known]
    return (*same, *there, *(text for text in back if "(" not in text.split("->")[0] or not there))


def _meaning(pattern: str) -> str:
    """A pattern without the names of its axes: `i o -> o i` and `o i -> i o` are one."""
    names = dict.fromkeys(_AXIS.findall(pattern))
    numbers = {name: name if name == "1" else str(number + 2) for number, name in enumerate(names)}
    return _AXIS.sub(lambda found: numbers[found[0]], pattern)


def is_plain(pattern: str) -> bool:
    """Whether axes stay in their order, each by itself."""
    left, _, right = pattern.partition("->")
    return [name for name in left.split() if name != "1"] == [name for name in right.split() if name != "1"]


def turn(pattern: str) -> str:
    """The way back."""
    left, _, right = pattern.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def sizes_of(pattern: str, wanted: tuple[int, ...]) -> dict[str, int]:
    """The sizes of axes that the left side merges, read off the shape of the right one."""
    left, right = (side.strip() for side in pattern.split("->"))
    if "(" not in left:
        return {}
    known = dict(zip(right.split(), wanted, strict=True))
    merged = left[left.index("(") + 1 : left.index(")")].split()
    return {merged[0]: known[merged[0]]}


def _fits(pattern: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    left, right = (side.strip() for side in pattern.split("->"))
    names = left.split()
    if len(names) != len(found) or any(name == "1" and size != 1 for name, size in zip(names, found, strict=True)):
        return False
    sizes = dict(zip(names, found, strict=True))
    return tuple(_merged(right, sizes)) == wanted


def _merged(side: str, sizes: dict[str, int]) -> Iterator[int]:
    inside = None
    for token in side.replace("(", "( ").replace(")", " )").split():
        if token == "(":
            inside = 1
        elif token == ")":
            yield inside or 1
            inside = None
        elif inside is not None:
            inside *= sizes[token]
        else:
            yield sizes[token]


class Way(NamedTuple):
    """How one column becomes another."""

    how: str = ""  # or "unstack" or "stack"
    layout: str = ""  # an axis pattern
    cut: Cut | None = None  # where one of the two is a group


def ways(a: Column, b: Column) -> list[Way]:
    """All that shapes allow."""
    if a.parts and b.parts:
        return []
    if a.parts or b.parts:
        return _ways_cut(a, b)
    layer = _one_layer(a, b)
    return [Way(layer[0], layout) for layout in layouts(*layer[1:])] if layer else []


def _one_layer(a: Column, b: Column) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Whether layers are cut or stacked, and both shapes of one layer."""
    if a.numbers == b.numbers:
        return "", a.shape, b.shape
    if not a.numbers and b.layers and a.shape[:1] == (b.layers,):
        return "unstack", a.shape[1:], b.shape
    if not b.numbers and a.layers and b.shape[:1] == (a.layers,):
        return "stack", a.shape, b.shape[1:]
    return None


def _ways_cut(a: Column, b: Column) -> list[Way]:
    """The same where one side is a group: the axis that it is cut along, and one layout for all parts."""
    parts = a.parts or b.parts
    layers = [_one_layer(part, b) if a.parts else _one_layer(a, part) for part in parts]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(parts):
        return []
    whole = known[0][2] if a.parts else known[0][1]
    shapes = [layer[1] if a.parts else layer[2] for layer in known]
    out = []
    for axis, sizes in _cuts(whole, [math.prod(shape) for shape in shapes]):
        pieces = [(*whole[:axis], size, *whole[axis + 1 :]) for size in sizes]
        found = [
            _layouts_of_piece(piece, shape, axis, not a.parts) for piece, shape in zip(pieces, shapes, strict=True)
        ]
        common = [layout for layout in found[0] if all(layout in others for others in found[1:])]
        out += [Way(known[0][0], layout, Cut(axis, sizes)) for layout in common]
    return out


def _cuts(whole: tuple[int, ...], counts: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each axis along which a shape can be cut so that the parts have so many elements."""
    total = sum(counts)
    if not total or math.prod(whole) != total:
        return
    for axis, size in enumerate(whole):
        if all(size * count % total == 0 for count in counts):
            yield axis, tuple([size * count // total for count in counts])


def _layouts_of_piece(piece: tuple[int, ...], part: tuple[int, ...], axis: int, is_split: bool) -> list[str]:
    """From a piece to a part, or back; an axis of which a piece has one may be gone in the part."""
    found = layouts(piece, part) if is_split else layouts(part, piece)
    if piece[axis] != 1:
        return list(found)
    bare = (*piece[:axis], *piece[axis + 1 :])
    inner = layouts(bare, part) if is_split else layouts(part, bare)
    return list(dict.fromkeys([*(_with_one(layout, len(bare), axis, is_split) for layout in inner), *found]))


def _with_one(layout: str, rank: int, axis: int, is_left: bool) -> str:
    """A layout with an axis of size 1 more on one side."""
    same = " ".join("abcdefgh"[:rank])
    sides = [_AXIS.findall(side) for side in (layout or f"{same} -> {same}").split("->")]
    sides[not is_left].insert(axis, "1")
    return " -> ".join(" ".join(side) for side in sides)
