"""What is found: pairs of columns, how sure each is and why, open questions, and what is left."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from orbaxkit.matching.columns import Column
from orbaxkit.matching.layouts import Cut, Way

_MOST_CANDIDATES = 5

Sure = Literal["certain", "likely", "proved"]


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a cut: of ours, that is split, or of theirs, that is joined."""

    verb: Literal["split", "concat"]
    number: int
    cut: Cut

    def __str__(self) -> str:
        start = sum(self.cut.sizes[: self.number])
        return f"{start}:{start + self.cut.sizes[self.number]} of axis {self.cut.axis}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A column of each side, how the one becomes the other, how sure that is, and why."""

    ours: Column
    theirs: Column
    how: str  # "", "unstack" or "stack"
    layout: str  # an axis pattern, or ""
    sure: Sure
    why: str
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """A column for which there are several, or several ways."""

    ours: str
    candidates: tuple[str, ...]
    why: str


@dataclass
class Pairing:
    """What was found between all columns of two sides."""

    columns: tuple[list[Column], list[Column]]
    pairs: list[Pair] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = tuple([{column.pattern for column in side} for side in self.columns])

    @property
    def ours(self) -> list[Column]:
        """What is left of ours."""
        return [column for column in self.columns[0] if self.is_free(0, column)]

    @property
    def theirs(self) -> list[Column]:
        """What is left of theirs."""
        return [column for column in self.columns[1] if self.is_free(1, column)]

    def is_free(self, side: int, column: Column) -> bool:
        """Whether neither a column nor any of its parts is in a pair."""
        return all(part.pattern in self._free[side] for part in column.parts or (column,))

    def take(self, a: Column, b: Column, way: Way, sure: Sure, why: str) -> bool:
        """Add a pair, or one for each part of a group, if all are free. Other dtypes are told, and never certain."""
        if not (self.is_free(0, a) and self.is_free(1, b)):
            return False
        self.pairs += pairs_of(a, b, way, sure, why)
        for side, column in enumerate((a, b)):
            self._free[side].difference_update(part.pattern for part in column.parts or (column,))
        return True

    def ask(self, a: Column, candidates: list[Column], why: str) -> None:
        """Add an open question; of many candidates the first, and how many more there are."""
        more = len(candidates) - _MOST_CANDIDATES
        told = f"{why}, and {more} more could be it" if more > 0 else why
        self.open.append(Open(a.pattern, tuple([b.pattern for b in candidates[:_MOST_CANDIDATES]]), told))

    def settle(self, k: int, sure: Sure, why: str) -> None:
        """Say of a pair that it is surer."""
        if self.pairs[k].ours.dtype == self.pairs[k].theirs.dtype:
            self.pairs[k] = replace(self.pairs[k], sure=sure, why=why)


def pairs_of(a: Column, b: Column, way: Way, sure: Sure, why: str) -> list[Pair]:
    """One pair, or one for each part of a group."""
    if way.cut is None:
        return [_pair(a, b, way, sure, why, None)]
    verb: Literal["split", "concat"] = "concat" if a.parts else "split"
    parts = [Part(verb, number, way.cut) for number in range(len(way.cut.sizes))]
    sides = zip(a.parts or [a] * len(parts), b.parts or [b] * len(parts), parts, strict=True)
    return [_pair(ours, theirs, way, sure, f"{why}, {part}", part) for ours, theirs, part in sides]


def _pair(a: Column, b: Column, way: Way, sure: Sure, why: str, part: Part | None) -> Pair:
    if a.dtype != b.dtype:
        sure, why = "likely", f"{why}, {a.dtype} and not {b.dtype}"
    return Pair(a, b, way.how, way.layout, sure, why, part)


def counts(pairs: Iterable[Pair]) -> dict[str, int]:
    """How many leaves of ours are matched, by how sure that is."""
    out: dict[str, int] = defaultdict(int)
    for each in pairs:
        out[each.sure] += max(len(each.ours.names), len(each.theirs.names))
    return dict(out)
