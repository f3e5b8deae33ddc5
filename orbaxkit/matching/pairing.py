"""Which column is which: by values where they are at hand, else by names and shapes; what cannot be told is open."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from orbaxkit.matching.columns import Column, singles
from orbaxkit.matching.layouts import Way, ways
from orbaxkit.matching.naming import by_names
from orbaxkit.matching.packing import every_group
from orbaxkit.matching.pairs import Pair, Pairing, pairs_of

Proofs = dict[tuple[Column, Column], list[Way]]


@runtime_checkable
class Digests(Protocol):
    """What leaves hold, as digests: those of ours as a pair would make them, those of theirs as they are."""

    def made(self, p: Pair) -> bytes:
        """What the pair makes of ours."""

    def wanted(self, p: Pair) -> bytes:
        """What theirs holds, of which a pair may make a part."""


def pair(ours: list[Column], theirs: list[Column], digests: Digests | None = None) -> Pairing:
    """Match two trees' columns. With digests, only what values show is taken, and it settles what names cannot.

    Layers that found no partner together are tried one by one.
    """
    out = _pair(ours, theirs, digests)
    if any(column.numbers for column in (*out.ours, *out.theirs)):
        rest = _pair(singles(out.ours), singles(out.theirs), digests)
        rest.pairs = [*out.pairs, *rest.pairs]
        return rest
    return out


def _pair(ours: list[Column], theirs: list[Column], digests: Digests | None) -> Pairing:
    out = Pairing((ours, theirs))
    if digests is None:
        by_names(out)
        return out
    _take_proved(_proofs(ours, theirs, digests), out)
    left = out.ours, out.theirs
    _take_proved(
        _proofs(every_group(*left), left[1], digests) | _proofs(left[0], every_group(*left[::-1]), digests), out
    )
    _explain(out)
    return out


def _proofs(ours: Iterable[Column], theirs: Iterable[Column], digests: Digests) -> Proofs:
    """All pairs that values show, with the ways that do; what a way makes of one of ours is looked up among theirs."""
    forms: dict[int, dict[Any, list[Column]]] = defaultdict(lambda: defaultdict(list))
    for b in theirs:
        forms[b.size][b.form, b.dtype].append(b)
    tables: dict[Any, dict[tuple[bytes, ...], list[Column]]] = {}
    out: Proofs = defaultdict(list)
    for a in ours:
        for (form, dtype), alike in forms[a.size].items():
            for way in ways(a, alike[0]) if a.dtype == dtype else ():
                table = tables.get((form, dtype, a.form, way))
                if table is None:
                    table = tables[form, dtype, a.form, way] = _table(a, alike, way, digests)
                made = tuple([digests.made(p) for p in pairs_of(a, alike[0], way, "proved", "")])
                for b in table.get(made, ()):
                    out[a, b].append(way)
    return out


def _table(a: Column, theirs: list[Column], way: Way, digests: Digests) -> dict[tuple[bytes, ...], list[Column]]:
    out: dict[tuple[bytes, ...], list[Column]] = defaultdict(list)
    for b in theirs:
        out[tuple([digests.wanted(p) for p in pairs_of(a, b, way, "proved", "")])].append(b)
    return out


def _take_proved(proofs: Proofs, out: Pairing) -> None:
    """What several columns hold alike is left open."""
    claims = Counter(claim for key in proofs for claim in _claims(*key))
    rivals: dict[Column, list[Column]] = defaultdict(list)
    for (a, b), held in proofs.items():
        if all(claims[claim] == 1 for claim in _claims(a, b)):
            why = "equal bit for bit" + ("" if len(held) == 1 else f", in {len(held)} layouts")
            out.take(a, b, held[0], "proved", why)
        else:
            rivals[a].append(b)
    for a, names in rivals.items():
        out.ask(a, names, "several hold the same values")


def _claims(a: Column, b: Column) -> list[tuple[int, str]]:
    """The columns of both sides that a pair is about."""
    return [(side, part.pattern) for side, column in enumerate((a, b)) for part in column.parts or (column,)]


def _explain(out: Pairing) -> None:
    """Why what names would match is not proved."""
    asked = {each.ours for each in out.open}
    guess = Pairing((out.ours, out.theirs))
    by_names(guess)
    for p in guess.pairs:
        if p.ours.pattern not in asked:
            differs = "its dtype differs" if p.ours.dtype != p.theirs.dtype else "its values differ"
            out.ask(p.ours, [p.theirs], f"by its name, but {differs}")
    out.open += [replace(each, why="none has its values") for each in guess.open if each.ours not in asked]
