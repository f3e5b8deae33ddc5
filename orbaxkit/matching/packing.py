"""Columns that another tree holds as one, joined along an axis: query, key and value, or gate and up."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

from orbaxkit.matching.columns import Column
from orbaxkit.matching.names import numbers_of, words_of

# The orders that parts usually come in.
_ORDERS = (("query", "key", "value"), ("key", "value"), ("gate", "up"))
_SIZES = (2, 3)
# Siblings of which every selection in every order is tried against values.
_MOST_SIBLINGS = 6

Sibling = tuple[str, Column]


def usual_groups(columns: Iterable[Column]) -> list[Column]:
    """Groups that names tell the order of: by convention, or by their numbers."""
    return [_group(key, chosen) for key, siblings in _siblings(columns) for chosen in _usual_orders(siblings)]


def every_group(columns: Iterable[Column], wholes: Iterable[Column]) -> list[Column]:
    """Groups in every order, that have as many elements as one of `wholes`."""
    counts = {whole.size for whole in wholes}
    return [
        _group(key, chosen)
        for key, siblings in _siblings(columns)
        if len(siblings) <= _MOST_SIBLINGS
        for size in _SIZES
        for chosen in permutations(siblings, size)
        if _are_alike(chosen) and sum(column.size for _, column in chosen) in counts
    ]


def _siblings(columns: Iterable[Column]) -> Iterator[tuple[tuple[Any, ...], list[Sibling]]]:
    """Columns whose names differ in one segment alone, with what they have there."""
    found: dict[tuple[Any, ...], list[Sibling]] = defaultdict(list)
    for column in columns:
        place = column.place
        for k, segment in enumerate(place):
            found[(*place[:k], None, *place[k + 1 :]), column.numbers, column.dtype].append((segment, column))
    for (masked, *_), siblings in found.items():
        if len(siblings) > 1:
            yield masked, siblings


def _usual_orders(siblings: list[Sibling]) -> Iterator[tuple[Sibling, ...]]:
    for order in _ORDERS:
        chosen = [[each for each in siblings if words_of(each[0]).keys() & set(order) == {role}] for role in order]
        if all(len(each) == 1 for each in chosen) and _are_alike(parts := tuple([each for (each,) in chosen])):
            yield parts
    words = {tuple(words_of(segment).items()) for segment, _ in siblings}
    numbers = {numbers_of(segment) for segment, _ in siblings}
    if len(siblings) in _SIZES and len(words) == 1 and len(numbers) == len(siblings) and _are_alike(siblings):
        yield tuple(sorted(siblings, key=lambda each: numbers_of(each[0])))


def _are_alike(siblings: Iterable[Sibling]) -> bool:
    """Whether shapes differ along one axis at most."""
    shapes = [column.shape for _, column in siblings]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        return False
    return sum(len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)) <= 1


def _group(masked: tuple[Any, ...], chosen: tuple[Sibling, ...]) -> Column:
    """A group as a column: `attn/{q,k,v}/kernel`."""
    inside = "{" + ",".join(segment for segment, _ in chosen) + "}"
    place = tuple([segment or inside for segment in masked])
    parts = tuple([column for _, column in chosen])
    return replace(parts[0], place=place, pattern="/".join(place), parts=parts)
