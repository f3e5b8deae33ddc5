"""Which column is which: by shapes that can become one another, then by names; what cannot be told is left open."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from orbaxkit.matching.columns import Column, singles
from orbaxkit.matching.layouts import Cut, Way, is_plain, ways
from orbaxkit.matching.names import Likeness, module_of, numbers_of, role_of, words_of
from orbaxkit.matching.packing import every_group, size_of, usual_groups

Sure = Literal["certain", "likely", "proved"]

# How much better than the next one a name has to be, to be taken at all.
_MARGIN = 0.04
_LEAST = 0.12


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
        self._free = set(self.columns[0]), set(self.columns[1])

    @property
    def ours(self) -> list[Column]:
        """What is left of ours."""
        return [column for column in self.columns[0] if column in self._free[0]]

    @property
    def theirs(self) -> list[Column]:
        """What is left of theirs."""
        return [column for column in self.columns[1] if column in self._free[1]]

    def is_free(self, a: Column, b: Column) -> bool:
        """Whether neither is in a pair, nor a part of either."""
        return self._free[0].issuperset(a.parts or (a,)) and self._free[1].issuperset(b.parts or (b,))

    def take(self, a: Column, b: Column, way: Way, sure: Sure, why: str) -> bool:
        """Add a pair, or one for each part of a group, if all are free."""
        if not self.is_free(a, b):
            return False
        self.pairs += _pairs(a, b, way, sure, why)
        self._free[0].difference_update(a.parts or (a,))
        self._free[1].difference_update(b.parts or (b,))
        return True


Possible = dict[Column, dict[Column, list[Way]]]
Scores = dict[tuple[Column, Column], float]
# Whether values show a pair; None where values are not looked at.
Prove = Callable[[Pair], bool]


def pair(ours: list[Column], theirs: list[Column], prove: Prove | None = None) -> Pairing:
    """Match two trees' columns. With `prove`, only what values show is taken, and it settles what names cannot.

    Layers that found no partner together are tried one by one.
    """
    out = _pair(ours, theirs, prove)
    if any(column.layers for column in (*out.ours, *out.theirs)):
        rest = _pair(singles(out.ours), singles(out.theirs), prove)
        rest.pairs = [*out.pairs, *rest.pairs]
        return rest
    return out


def _pair(ours: list[Column], theirs: list[Column], prove: Prove | None) -> Pairing:
    out = Pairing((ours, theirs))
    if prove is None:
        groups = usual_groups(ours), usual_groups(theirs)
        possible = _possible([*ours, *groups[0]], [*theirs, *groups[1]])
        _by_names(possible, out)
        _raise_certain(possible, out)
        _tell_open(possible, out, "its name does not tell which")
        return out
    possible = _possible(ours, theirs)
    _by_values(possible, prove, out)
    groups = every_group(out.ours, out.theirs), every_group(out.theirs, out.ours)
    _by_values(_possible(groups[0], out.theirs) | _possible(out.ours, groups[1]), prove, out)
    _tell_open(possible, out, "none has its values")
    return out


def _possible(ours: Iterable[Column], theirs: Iterable[Column]) -> Possible:
    """What can become what: only columns of one size are compared."""
    sized: dict[int, list[Column]] = defaultdict(list)
    for b in theirs:
        sized[size_of(b)].append(b)
    return {a: {b: found for b in sized[size_of(a)] if (found := ways(a, b))} for a in ours}


def _tell_open(possible: Possible, out: Pairing, why: str) -> None:
    """What is left on both sides and could be a pair."""
    told = {each.ours for each in out.open}
    for a, found in possible.items():
        candidates = tuple([b.pattern for b in found if out.is_free(a, b)])
        if candidates and a.pattern not in told:
            out.open.append(Open(a.pattern, candidates[:5], why))


def _pairs(a: Column, b: Column, way: Way, sure: Sure, why: str) -> list[Pair]:
    """One pair, or one for each part of a group."""
    if way.cut is None:
        return [Pair(a, b, way.how, way.layout, sure, why)]
    verb: Literal["split", "concat"] = "concat" if a.parts else "split"
    out = []
    for number, column in enumerate(a.parts or b.parts):
        part = Part(verb, number, way.cut)
        ours, theirs = (column, b) if a.parts else (a, column)
        out.append(Pair(ours, theirs, way.how, way.layout, sure, f"{why}, {part}", part))
    return out


def _by_names(possible: Possible, out: Pairing) -> None:
    """Best names first; a column is taken when each is the other's best by a margin among those that are left."""
    likeness = Likeness(column.pattern for side in out.columns for column in side)
    scores = {(a, b): likeness(a.pattern, b.pattern) for a, found in possible.items() for b in found}
    for a, b in scores:
        if a.pattern == b.pattern and Way() in possible[a][b]:
            out.take(a, b, Way(), "certain", "the same name and shape")
    changed = True
    while changed:
        changed = _by_siblings(possible, out)
        scores = _free(scores, out)
        changed |= _by_numbers(scores, possible, out)
        scores = _free(scores, out)
        best_ours, best_theirs = _best(scores, 0), _best(scores, 1)
        for (a, b), score in sorted(scores.items(), key=lambda item: -item[1]):
            if score < _LEAST or best_ours[a] != (b, True) or best_theirs[b] != (a, True):
                continue
            changed |= _take_likely(a, b, possible, f"names {score:.0%} alike", out)


def _take_likely(a: Column, b: Column, possible: Possible, why: str, out: Pairing) -> bool:
    """Take a pair in the way that is usual, if one is."""
    way, is_only = _way(a, b, possible[a][b])
    if way is None:
        return False
    return out.take(a, b, way, "likely", why if is_only else f"{why}, of several layouts the usual one")


def _free(scores: Scores, out: Pairing) -> Scores:
    """Those of columns that are not taken yet."""
    return {key: score for key, score in scores.items() if out.is_free(*key)}


def _by_siblings(possible: Possible, out: Pairing) -> bool:
    """Where a leaf of a module is one of another module's: the bias beside a kernel is the other's bias."""
    partners: dict[str, set[str]] = defaultdict(set)
    for p in out.pairs:
        if p.part is None:
            partners[module_of(p.ours.pattern)].add(module_of(p.theirs.pattern))
    beside: dict[Column, list[Column]] = {}
    for a, found in possible.items():
        module = module_of(a.pattern)
        if module and len(partners[module]) == 1 and not a.parts:
            near = [b for b in found if module_of(b.pattern) in partners[module] and not b.parts]
            beside[a] = [b for b in near if out.is_free(a, b) and _have_one_role(a, b)]
    rivals = Counter(b for near in beside.values() for b in near)
    only = [(a, near[0]) for a, near in beside.items() if len(near) == 1 and rivals[near[0]] == 1]
    taken = [_take_likely(a, b, possible, f"beside {module_of(b.pattern)}'s others", out) for a, b in only]
    return any(taken)


def _have_one_role(a: Column, b: Column) -> bool:
    return words_of(role_of(a.pattern)) == words_of(role_of(b.pattern))


def _by_numbers(scores: Scores, possible: Possible, out: Pairing) -> bool:
    """As many columns on both sides with the same words, each other's best: in the order of their numbers."""
    ours, theirs = _tops(scores, 0), _tops(scores, 1)
    for partners in ours.values():
        alike = {a for b in partners for a in theirs.get(b, ())}
        is_closed = len(alike) == len(partners) > 1 and all(ours.get(a) == partners for a in alike)
        if is_closed and _differ_in_numbers(alike) and _differ_in_numbers(partners):
            pairs = zip(_in_order(alike), _in_order(partners), strict=True)
            taken = [_take_likely(a, b, possible, "in the order of their numbers", out) for a, b in pairs]
            if any(taken):
                return True
    return False


def _tops(scores: Scores, side: int) -> dict[Column, set[Column]]:
    """The best partners of each column: all that are within the margin."""
    top: dict[Column, float] = defaultdict(float)
    for key, score in scores.items():
        top[key[side]] = max(top[key[side]], score)
    out: dict[Column, set[Column]] = defaultdict(set)
    for key, score in scores.items():
        if score >= max(_LEAST, top[key[side]] - _MARGIN):
            out[key[side]].add(key[1 - side])
    return out


def _differ_in_numbers(columns: Iterable[Column]) -> bool:
    """Whether columns have the same words, and numbers of their own."""
    patterns = [column.pattern for column in columns]
    words = {tuple(sorted(words_of(pattern).items())) for pattern in patterns}
    return len(words) == 1 and len({numbers_of(pattern) for pattern in patterns}) == len(patterns)


def _in_order(columns: Iterable[Column]) -> list[Column]:
    return sorted(columns, key=lambda column: numbers_of(column.pattern))


def _best(scores: Scores, side: int) -> dict[Column, tuple[Column | None, bool]]:
    """The best partner of each column, and whether it is so by a margin."""
    ranked: dict[Column, list[tuple[float, Column]]] = defaultdict(list)
    for pair_, score in scores.items():
        ranked[pair_[side]].append((score, pair_[1 - side]))
    out: dict[Column, tuple[Column | None, bool]] = {}
    for column, found in ranked.items():
        found.sort(key=lambda item: -item[0])
        out[column] = found[0][1], len(found) < 2 or found[0][0] - found[1][0] > _MARGIN
    return out


def _way(a: Column, b: Column, found: list[Way]) -> tuple[Way | None, bool]:
    """The way that frameworks usually mean: a kernel becomes a torch weight transposed, everything else stays.

    None where several cuts are as good.
    """
    if len(found) == 1:
        return found[0], True
    roles = {role_of(a.pattern), role_of(b.pattern)}
    turns = "weight" in roles and roles & {"kernel", "w"}
    plain = [way for way in found if is_plain(way.layout)]
    moved = [way for way in found if not is_plain(way.layout)]
    chosen = moved if turns and moved else plain or moved
    if a.parts or b.parts:
        simplest = min(map(_complexity, chosen))
        chosen = [way for way in chosen if _complexity(way) == simplest]
        return (chosen[0] if len({way.cut for way in chosen}) == 1 else None), False
    return chosen[0], False


def _complexity(way: Way) -> tuple[bool, bool]:
    """Merged axes are rarer than others; an axis that has one of each part is no coincidence."""
    return "(" in way.layout, way.cut is None or set(way.cut.sizes) != {1}


def _by_values(possible: Possible, prove: Prove, out: Pairing) -> None:
    """Every way is tried; what several columns hold alike is left open."""
    proved = {
        (a, b): held
        for a, found in possible.items()
        for b, tried in found.items()
        if (held := [way for way in tried if all(map(prove, _pairs(a, b, way, "proved", "")))])
    }
    claims = Counter(claim for key in proved for claim in _claims(*key))
    for (a, b), held in proved.items():
        if all(claims[claim] == 1 for claim in _claims(a, b)):
            why = "equal bit for bit" + ("" if len(held) == 1 else f", in {len(held)} layouts")
            out.take(a, b, held[0], "proved", why)
        elif not any(each.ours == a.pattern for each in out.open):
            names = tuple([y.pattern for x, y in proved if x == a])
            out.open.append(Open(a.pattern, names, "several hold the same values"))


def _claims(a: Column, b: Column) -> list[tuple[int, Column]]:
    """The columns of both sides that a pair is about."""
    return [(side, part) for side, column in enumerate((a, b)) for part in column.parts or (column,)]


def _raise_certain(possible: Possible, out: Pairing) -> None:
    """Certain is what nothing else could be: where all is matched, shapes leave one partner and one way."""
    if out.ours or out.theirs:
        return
    rivals: dict[Column, int] = defaultdict(int)
    for found in possible.values():
        for b in found:
            rivals[b] += 1
    for k, each in enumerate(out.pairs):
        is_only = each.part is None and len(possible[each.ours]) == 1 and rivals[each.theirs] == 1
        if is_only and len(possible[each.ours][each.theirs]) == 1:
            out.pairs[k] = Pair(each.ours, each.theirs, each.how, each.layout, "certain", "the only one of its shape")


def counts(pairs: Iterable[Pair]) -> dict[str, int]:
    """How many leaves of ours are matched, by how sure that is."""
    out: dict[str, int] = defaultdict(int)
    for each in pairs:
        out[each.sure] += max(len(each.ours.names), len(each.theirs.names))
    return dict(out)
