"""How the axes of one shape can become those of another."""

from collections.abc import Iterator
from functools import lru_cache

from orbaxkit.matching.columns import Column

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


@lru_cache(maxsize=65536)
def layouts(found: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[str, ...]:
    """The axis patterns that turn one shape into the other, "" where they are equal; the plain ones first."""
    same = [""] if found == wanted else []
    there = [pattern for pattern in _PATTERNS if _fits(pattern, found, wanted)]
    back = [turned for pattern in _PATTERNS if _fits(pattern, wanted, found) and (turned := turn(pattern)) not in there]
    return (*same, *there, *(text for text in back if "(" not in text.split("->")[0] or not there))


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


def ways(a: Column, b: Column) -> list[tuple[str, str]]:
    """How a column can become another: ("", "unstack" or "stack") and an axis pattern for each."""
    if a.layers == b.layers:
        return [("", layout) for layout in layouts(a.shape, b.shape)]
    if a.layers is None and b.layers is not None and a.shape[:1] == (b.layers,):
        return [("unstack", layout) for layout in layouts(a.shape[1:], b.shape)]
    if b.layers is None and a.layers is not None and b.shape[:1] == (a.layers,):
        return [("stack", layout) for layout in layouts(a.shape, b.shape[1:])]
    return []
