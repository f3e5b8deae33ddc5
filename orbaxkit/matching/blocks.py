"""Which module of one tree is which of another: those with as many elements, from the largest to the smallest."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Generic, TypeVar

import numpy as np

from orbaxkit.matching.columns import Column, Place
from orbaxkit.matching.names import Likeness, order_of, plain

# How much better than the next one a name has to be, to be taken at all, and how good at least.
_MARGIN = 0.04
_LEAST = 0.12
# More modules of one size than that are not told apart by their names.
_MOST_ALIKE = 64

T = TypeVar("T")
Order = tuple[int, ...]


@dataclass(frozen=True)
class Family(Generic[T]):
    """Members that have a name in common, in the order that the rest of their names tells."""

    name: Hashable
    text: str
    members: list[T]
    orders: list[Order]

    @property
    def is_ordered(self) -> bool:
        """Whether no two have the same place in the order."""
        return all(a < b for a, b in pairwise(self.orders))

    @property
    def numbers(self) -> list[Order]:
        """The orders, of which only what differs counts; what has no number is number 0."""
        levels = [level for level in zip_longest(*self.orders, fillvalue=0) if len(set(level)) > 1]
        return list(zip(*levels, strict=True)) if levels else [()] * len(self.members)

    @property
    def is_whole(self) -> bool:
        """Whether they are counted from 0 or 1 without gaps."""
        first = self.numbers[0]
        return first in ((0,), (1,)) and self.numbers == [(first[0] + k,) for k in range(len(self.members))]


Families = list[Family[T]]
Blocks = dict[Place, int]  # the modules that have a counterpart, each with the same number as that


def blocks_of(ours: Iterable[Column], theirs: Iterable[Column], likeness: Likeness) -> tuple[Blocks, Blocks]:
    """The modules that are counterparts; a module's inner ones are looked for in its counterpart alone.

    However leaves are laid out, cut, joined and stacked, a module keeps its number of elements.
    """
    blocks: tuple[Blocks, Blocks] = {(): 0}, {(): 0}
    sizes = _modules(ours), _modules(theirs)
    for size in sorted(sizes[0].keys() & sizes[1].keys(), reverse=True):
        inside: tuple[dict[int, list[Place]], dict[int, list[Place]]] = defaultdict(list), defaultdict(list)
        for side in (0, 1):
            for node in sizes[side][size]:
                inside[side][block_of(node, blocks[side])[0]].append(node)
        for number in inside[0].keys() & inside[1].keys():
            for a, b in _counterparts(inside[0][number], inside[1][number], blocks, likeness):
                blocks[0][a] = blocks[1][b] = len(blocks[0])
    return blocks


def block_of(place: Place, blocks: Blocks) -> tuple[int, Place]:
    """The number of the innermost block around a place, and the place within it."""
    depth = next(k for k in range(max(len(place) - 1, 0), -1, -1) if place[:k] in blocks)
    return blocks[place[:depth]], place[depth:]


def _modules(columns: Iterable[Column]) -> dict[int, list[Place]]:
    """The modules by their size; of those that hold the same leaves, the innermost."""
    sizes: dict[Place, int] = defaultdict(int)
    counts: dict[Place, int] = defaultdict(int)
    for column in columns:
        for k in range(1, len(column.place)):
            sizes[column.place[:k]] += column.size
            counts[column.place[:k]] += 1
    outer = {node[:-1] for node in counts if counts[node] == counts.get(node[:-1])}
    out: dict[int, list[Place]] = defaultdict(list)
    for node, size in sizes.items():
        if node not in outer and counts[node] > 1:
            out[size].append(node)
    return out


def _counterparts(
    ours: list[Place], theirs: list[Place], blocks: tuple[Blocks, Blocks], likeness: Likeness
) -> list[tuple[Place, Place]]:
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    if max(len(ours), len(theirs)) > _MOST_ALIKE:
        return []
    families = [
        families_of(((block_of(node, blocks[side])[1], node) for node in nodes), plain, order_of, lambda node: ())
        for side, nodes in enumerate((ours, theirs))
    ]

    def score(ours: Families[Place], theirs: Families[Place]) -> np.ndarray:
        return likeness([family.text for family in ours], [family.text for family in theirs])

    return [(a, b) for a, b, _ in settle(families[0], families[1], score, by_number)]


def families_of(
    entries: Iterable[tuple[Place, T]],
    name: Callable[[Place], Hashable],
    order: Callable[[Place], Order],
    kind: Callable[[T], Hashable],
) -> Families[T]:
    """What differs only in its order, in that order; what has no like keeps its whole name."""
    found: dict[tuple[Hashable, Hashable], list[tuple[Order, Place, T]]] = defaultdict(list)
    for place, member in entries:
        found[name(place), kind(member)].append((order(place), place, member))
    out = []
    for (what, _), members in found.items():
        members.sort(key=lambda entry: entry[0])
        text = str(what) if len(members) > 1 else "/".join(members[0][1])
        out.append(Family(what, text, [member for *_, member in members], [order for order, *_ in members]))
    return out


def settle(
    ours: Families[T],
    theirs: Families[T],
    score: Callable[[Families[T], Families[T]], np.ndarray],
    pairs_of: Callable[[Family[T], Family[T]], list[tuple[T, T]]],
) -> list[tuple[T, T, float]]:
    """Members of families that are each other's best by a margin."""
    if not ours or not theirs:
        return []
    scores = score(ours, theirs)
    rows, columns = _leads(scores), _leads(scores.T)
    out: list[tuple[T, T, float]] = []
    for i, j in enumerate(rows):
        if j >= 0 and columns[j] == i and ours[i].is_ordered and theirs[j].is_ordered:
            out += [(a, b, float(scores[i, j])) for a, b in pairs_of(ours[i], theirs[j])]
    return out


def in_order(ours: Family[T], theirs: Family[T]) -> list[tuple[T, T]]:
    """As many in the same order."""
    return list(zip(ours.members, theirs.members, strict=True)) if len(ours.members) == len(theirs.members) else []


def by_number(ours: Family[T], theirs: Family[T]) -> list[tuple[T, T]]:
    """As many, counted without gaps, or only one: in order. Else those of the same number, since some are missing."""
    if len(ours.members) == 1 or (ours.is_whole and theirs.is_whole):
        return in_order(ours, theirs)
    known = dict(zip(theirs.numbers, theirs.members, strict=True))
    return [(a, known[number]) for number, a in zip(ours.numbers, ours.members, strict=True) if number in known]


def _leads(scores: np.ndarray) -> list[int]:
    """The best of each row, -1 where it is not so by a margin or not good enough."""
    top = scores.max(1)
    second = np.partition(scores, -2, 1)[:, -2] if scores.shape[1] > 1 else np.zeros_like(top)
    is_clear = (top >= _LEAST) & (top - second > _MARGIN)
    return [int(k) for k in np.where(is_clear, scores.argmax(1), -1)]
