"""Pairs by what names and shapes say: block by block, what is alike by name, then what is in the same order."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator

import numpy as np

from orbaxkit.matching.blocks import Blocks, Families, block_of, blocks_of, by_number, families_of, in_order, settle
from orbaxkit.matching.columns import Column, Place
from orbaxkit.matching.layouts import Way, is_plain, ways
from orbaxkit.matching.names import Likeness, are_opposed, built_order, kernel_role, kind_of, order_of, plain
from orbaxkit.matching.packing import usual_groups
from orbaxkit.matching.pairs import Pairing

# What a name counts for where the usual layout does not fit, only another.
_UNUSUAL = 0.8
_MOST_ROUNDS = 16
_NO_BLOCKS: tuple[Blocks, Blocks] = {(): 0}, {(): 0}

Entry = tuple[Place, Column]  # a column, and where it is in its block
Bucket = tuple[list[Entry], list[Entry]]


def by_names(out: Pairing) -> None:
    """Take what is certain or likely; what could be several is open."""
    _by_same_names(out)
    ours, theirs = out.columns
    likeness = Likeness("/".join(column.place) for side in out.columns for column in side)
    every = [*ours, *usual_groups(out.ours)], [*theirs, *usual_groups(out.theirs)]
    for blocks in (blocks_of(ours, theirs, likeness), _NO_BLOCKS):
        for _ in range(_MOST_ROUNDS):
            taken = [_settle(bucket, number > 0, likeness, out) for number, bucket in _buckets(every, blocks, out)]
            if not any(taken):
                break
    if out.pairs and len(out.ours) == len(out.theirs) == 1:
        _take(
            _last(([(out.ours[0].place, out.ours[0])], [(out.theirs[0].place, out.theirs[0])]), "all that is left"), out
        )
    _raise_certain(every, out)
    for _, bucket in _buckets((ours, theirs), _NO_BLOCKS, out):
        _tell_open(bucket, out)


def _by_same_names(out: Pairing) -> None:
    named = {column.pattern: column for column in out.theirs}
    for a in out.ours:
        b = named.get(a.pattern)
        if b is not None and a.form == b.form:
            out.take(a, b, Way(), "certain", "the same name and shape")


def _buckets(
    columns: tuple[list[Column], list[Column]], blocks: tuple[Blocks, Blocks], out: Pairing
) -> Iterator[tuple[int, Bucket]]:
    """The columns that are free, by their block and how many elements they have."""
    found: dict[tuple[int, int], Bucket] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for column in columns[side]:
            if out.is_free(side, column):
                number, inner = block_of(column.place, blocks[side])
                found[number, column.size][side].append((inner, column))
    yield from ((number, bucket) for (number, _), bucket in found.items() if all(bucket))


def _settle(bucket: Bucket, is_block: bool, likeness: Likeness, out: Pairing) -> bool:
    """Whether anything is taken: by names, else in the order of construction, else as the last that is left."""
    found = [(a, b, f"names {alike:.0%} alike") for a, b, alike in _alike(bucket, likeness)]
    if not _take(found, out) and is_block:
        found = [(a, b, "in the order of construction") for a, b, _ in _in_order(bucket)]
        if not _take(found, out):
            return _take(_last(bucket, "the last of its size in its block"), out)
    return bool(found)


def _alike(bucket: Bucket, likeness: Likeness) -> list[tuple[Column, Column, float]]:
    def score(ours: Families[Column], theirs: Families[Column]) -> np.ndarray:
        return likeness([family.text for family in ours], [family.text for family in theirs]) * _fits(ours, theirs)

    ours, theirs = (families_of(entries, plain, order_of, _kind) for entries in bucket)
    return settle(ours, theirs, score, by_number)


def _in_order(bucket: Bucket) -> list[tuple[Column, Column, float]]:
    """Within a block, what is of one kind: names need not be alike where both sides are ordered."""

    def score(ours: Families[Column], theirs: Families[Column]) -> np.ndarray:
        same = np.array([[a.name == b.name for b in theirs] for a in ours], np.float32)
        return np.asarray(same * _fits(ours, theirs))

    leaves = ([(place, column) for place, column in entries if not column.parts] for entries in bucket)
    ours, theirs = (families_of(entries, kind_of, built_order, _kind) for entries in leaves)
    return settle(ours, theirs, score, in_order)


def _last(bucket: Bucket, why: str) -> list[tuple[Column, Column, str]]:
    ours, theirs = bucket
    if ours[0][1].parts or theirs[0][1].parts:
        return []
    if len(ours) > 1 or len(theirs) > 1 or are_opposed(*("/".join(side[0][0]) for side in bucket)):
        return []
    return [(ours[0][1], theirs[0][1], why)]


def _kind(column: Column) -> Hashable:
    return column.form, kernel_role(column.place[-1])


def _fits(ours: Families[Column], theirs: Families[Column]) -> np.ndarray:
    """1 where one can become the other in the usual way, less where only in another, 0 where not at all."""
    (rows, ours_at), (columns, theirs_at) = (_kinds(families) for families in (ours, theirs))
    table = np.array([[_fit(a, b) for b in columns] for a in rows], np.float32)
    return table[np.ix_(ours_at, theirs_at)]


def _kinds(families: Families[Column]) -> tuple[list[Column], list[int]]:
    """One column of each kind, and which kind each family is of."""
    kinds: dict[Hashable, int] = {}
    at = [kinds.setdefault(_kind(family.members[0]), len(kinds)) for family in families]
    return [families[at.index(number)].members[0] for number in kinds.values()], at


def _fit(a: Column, b: Column) -> float:
    found = ways(a, b)
    if not found:
        return 0.0
    turns = _turns(a, b)
    return 1.0 if turns is None or any(is_plain(way.layout) != turns for way in found) else _UNUSUAL


def _turns(a: Column, b: Column) -> bool | None:
    """Whether the usual layout moves axes: from a kernel to a torch weight; None where names do not tell."""
    roles = {kernel_role(a.place[-1]), kernel_role(b.place[-1])}
    if "" in roles:
        return None
    return len(roles) > 1 and len(a.shape) > 1


def _take(found: Iterable[tuple[Column, Column, str]], out: Pairing) -> bool:
    taken = [_take_one(a, b, why, out) for a, b, why in found]
    return any(taken)


def _take_one(a: Column, b: Column, why: str, out: Pairing) -> bool:
    """Take a pair in the way that is usual, if one is."""
    found = ways(a, b)
    way = _usual(a, b, found)
    if way is None:
        return False
    others = ", ".join(other.layout or "as it is" for other in found if other.layout != way.layout)
    return out.take(a, b, way, "likely", f"{why}, the usual layout and not {others}" if others else why)


def _usual(a: Column, b: Column, found: list[Way]) -> Way | None:
    """The way that frameworks usually mean; None where several cuts are as good, or none is a way."""
    moved = [way for way in found if not is_plain(way.layout)]
    chosen = (moved if _turns(a, b) else [way for way in found if is_plain(way.layout)]) or found
    if a.parts or b.parts:
        simplest = min(map(_complexity, chosen), default=None)
        chosen = [way for way in chosen if _complexity(way) == simplest]
        chosen = chosen if len({way.cut for way in chosen}) == 1 else []
    return chosen[0] if chosen else None


def _complexity(way: Way) -> tuple[bool, bool]:
    """Merged axes are rarer than others; an axis that has one of each part is no coincidence."""
    return "(" in way.layout, way.cut is None or set(way.cut.sizes) != {1}


def _raise_certain(every: tuple[list[Column], list[Column]], out: Pairing) -> None:
    """Certain is what nothing else could be: where all is matched, shapes leave one partner and one way."""
    if out.ours or out.theirs:
        return
    sizes = [Counter(column.size for column in side) for side in every]
    for k, each in enumerate(out.pairs):
        is_only = sizes[0][each.ours.size] == sizes[1][each.theirs.size] == 1
        if is_only and each.part is None and len(ways(each.ours, each.theirs)) == 1:
            out.settle(k, "certain", "the only one of its size")


def _tell_open(bucket: Bucket, out: Pairing) -> None:
    """What is left on both sides and could be a pair."""
    forms: dict[Hashable, list[Column]] = defaultdict(list)
    for _, b in bucket[1]:
        forms[b.form].append(b)
    possible: dict[Hashable, list[Column]] = {}
    for _, a in bucket[0]:
        if a.form not in possible:
            possible[a.form] = [b for alike in forms.values() if ways(a, alike[0]) for b in alike]
        if possible[a.form]:
            out.ask(a, possible[a.form], "its name does not tell which")
