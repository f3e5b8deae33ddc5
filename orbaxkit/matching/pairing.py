"""Which column is which: by shapes that can become one another, then by names; what cannot be told is left open."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from orbaxkit.matching.columns import Column, singles
from orbaxkit.matching.layouts import ways
from orbaxkit.matching.names import Likeness, numbers_of, role_of, words_of

Sure = Literal["certain", "likely", "proved"]

# How much better than the next one a name has to be, to be taken at all.
_MARGIN = 0.04
_LEAST = 0.12


@dataclass(frozen=True, slots=True)
class Pair:
    """A column of each side, how the one becomes the other, how sure that is, and why."""

    ours: Column
    theirs: Column
    how: str  # "", "unstack" or "stack"
    layout: str  # an axis pattern, or ""
    sure: Sure
    why: str


@dataclass(frozen=True, slots=True)
class Open:
    """A column for which there are several, or several ways."""

    ours: str
    candidates: tuple[str, ...]
    why: str


@dataclass
class Pairing:
    """What was found, and what is left on both sides."""

    pairs: list[Pair] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    ours: list[Column] = field(default_factory=list)
    theirs: list[Column] = field(default_factory=list)


Way = tuple[str, str]
Possible = dict[Column, dict[Column, list[Way]]]
Scores = dict[tuple[Column, Column], float]
# Whether a column becomes another in some way, by values; None where values are not looked at.
Prove = Callable[[Column, Column, Way], bool]


def pair(ours: list[Column], theirs: list[Column], prove: Prove | None = None) -> Pairing:
    """Match two trees' columns. With `prove`, only what values show is taken, and it settles what names cannot.

    Layers that found no partner together are tried one by one.
    """
    out = _pair(ours, theirs, prove)
    if any(column.layers for column in (*out.ours, *out.theirs)):
        rest = _pair(singles(out.ours), singles(out.theirs), prove)
        out = Pairing([*out.pairs, *rest.pairs], rest.open, rest.ours, rest.theirs)
    return out


def _pair(ours: list[Column], theirs: list[Column], prove: Prove | None) -> Pairing:
    possible = {a: {b: found for b in theirs if (found := ways(a, b))} for a in ours}
    out = Pairing()
    if prove is not None:
        _by_values(possible, prove, out)
    else:
        _by_names(possible, Likeness((a.pattern for a in ours), (b.pattern for b in theirs)), out)
    used = {p.ours for p in out.pairs}, {p.theirs for p in out.pairs}
    out.ours = [a for a in ours if a not in used[0]]
    out.theirs = [b for b in theirs if b not in used[1]]
    if prove is None:
        _raise_certain(possible, out)
    told = {each.ours for each in out.open}
    for a in out.ours:
        candidates = tuple([b.pattern for b in possible[a] if b not in used[1]])
        if candidates and a.pattern not in told:
            out.open.append(Open(a.pattern, candidates[:5], "its name does not tell which"))
    return out


def _by_names(possible: Possible, likeness: Likeness, out: Pairing) -> None:
    """Best names first; a column is taken when each is the other's best by a margin among those that are left."""
    scores = {(a, b): likeness(a.pattern, b.pattern) for a, found in possible.items() for b in found}
    for (a, b), _ in scores.items():
        if a.pattern == b.pattern and ("", "") in possible[a][b]:
            out.pairs.append(Pair(a, b, "", "", "certain", "the same name and shape"))
    scores = _free(scores, out)
    changed = True
    while changed:
        changed = _by_numbers(scores, possible, out)
        scores = _free(scores, out)
        best_ours, best_theirs = _best(scores, 0), _best(scores, 1)
        for (a, b), score in sorted(scores.items(), key=lambda item: -item[1]):
            if score < _LEAST or best_ours[a] != (b, True) or best_theirs[b] != (a, True):
                continue
            way, is_only = _way(a, b, possible[a][b])
            why = f"names {score:.0%} alike" + ("" if is_only else ", of several layouts the usual one")
            out.pairs.append(Pair(a, b, *way, "likely", why))
            changed = True


def _free(scores: Scores, out: Pairing) -> Scores:
    """Those of columns that are not taken yet."""
    ours, theirs = {p.ours for p in out.pairs}, {p.theirs for p in out.pairs}
    return {key: score for key, score in scores.items() if key[0] not in ours and key[1] not in theirs}


def _by_numbers(scores: Scores, possible: Possible, out: Pairing) -> bool:
    """As many columns on both sides with the same words, each other's best: in the order of their numbers."""
    ours, theirs = _tops(scores, 0), _tops(scores, 1)
    for partners in ours.values():
        alike = {a for b in partners for a in theirs.get(b, ())}
        is_closed = len(alike) == len(partners) > 1 and all(ours.get(a) == partners for a in alike)
        if is_closed and _differ_in_numbers(alike) and _differ_in_numbers(partners):
            for a, b in zip(_in_order(alike), _in_order(partners), strict=True):
                out.pairs.append(Pair(a, b, *_way(a, b, possible[a][b])[0], "likely", "in the order of their numbers"))
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


def _way(a: Column, b: Column, found: list[Way]) -> tuple[Way, bool]:
    """The way that frameworks usually mean: a kernel becomes a torch weight transposed, everything else stays."""
    if len(found) == 1:
        return found[0], True
    roles = {role_of(a.pattern), role_of(b.pattern)}
    turns = "weight" in roles and roles & {"kernel", "w"}
    plain = [way for way in found if way[1] == ""]
    moved = [way for way in found if way[1] != ""]
    chosen = moved if turns and moved else plain or moved
    return chosen[0], False


def _by_values(possible: Possible, prove: Prove, out: Pairing) -> None:
    """Every way is tried; what several columns hold alike is left open."""
    proved = {
        (a, b): held
        for a, found in possible.items()
        for b, tried in found.items()
        if (held := [way for way in tried if prove(a, b, way)])
    }
    for (a, b), held in proved.items():
        rivals = [other for (x, other) in proved if x == a and other != b]
        rivals_theirs = [x for (x, other) in proved if other == b and x != a]
        if rivals or rivals_theirs:
            names = tuple(column.pattern for column in (b, *rivals))
            if not any(each.ours == a.pattern for each in out.open):
                out.open.append(Open(a.pattern, names, "several hold the same values"))
            continue
        why = "equal bit for bit" + ("" if len(held) == 1 else f", in {len(held)} layouts")
        out.pairs.append(Pair(a, b, *held[0], "proved", why))


def _raise_certain(possible: Possible, out: Pairing) -> None:
    """Certain is what nothing else could be: where all is matched, shapes leave one partner and one way."""
    if out.ours or out.theirs:
        return
    rivals: dict[Column, int] = defaultdict(int)
    for found in possible.values():
        for b in found:
            rivals[b] += 1
    for k, each in enumerate(out.pairs):
        is_only = len(possible[each.ours]) == 1 and rivals[each.theirs] == 1
        if is_only and len(possible[each.ours][each.theirs]) == 1:
            out.pairs[k] = Pair(each.ours, each.theirs, each.how, each.layout, "certain", "the only one of its shape")


def counts(pairs: Iterable[Pair]) -> dict[str, int]:
    """How many leaves of ours are matched, by how sure that is."""
    out: dict[str, int] = defaultdict(int)
    for each in pairs:
        out[each.sure] += max(len(each.ours.names), len(each.theirs.names))
    return dict(out)
