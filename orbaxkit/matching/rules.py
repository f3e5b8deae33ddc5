"""Pairs of columns as rules that make one tree into the other."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from orbaxkit.matching.columns import Column
from orbaxkit.matching.layouts import sizes_of
from orbaxkit.matching.pairs import Pair, Part
from orbaxkit.paths import KeyPath, compile_pattern, parse_path
from orbaxkit.transforms import concat, drop, rename, reshape, split, stack, unstack
from orbaxkit.transforms.subtrees import pattern_segments


class _Move(NamedTuple):
    """One leaf, or one pattern: from where to where once layers and parts are cut, before they are joined."""

    source: str
    target: str
    layout: str
    wanted: tuple[int, ...]
    part: Part | None


def rules_of(pairs: Iterable[Pair], left: Iterable[str] = ()) -> Iterator[Any]:
    """Drop what is in the way, cut layers and parts, lay out, rename, join parts, stack layers.

    `left` are the leaves that no pair is about.
    """
    pairs = list(pairs)
    blocked = _in_the_way(left, pairs)
    if blocked:
        yield drop(*blocked)
    for ours in dict.fromkeys(p.ours for p in pairs if p.how == "unstack"):
        yield unstack(ours.pattern, into=f"{_last(ours.pattern)}/layer_{{i}}", axis=0)
    moves = list(_moves(pairs))
    yield from _once(_split(move.source, move.part) for move in moves if move.part and move.part.verb == "split")
    for move in moves:
        if move.layout:
            yield reshape(_source(move), move.layout, **sizes_of(move.layout, move.wanted))
    renamed = {_source(move): _target(move) for move in moves if _source(move) != _target(move)}
    if renamed:
        yield rename(renamed)  # type: ignore[arg-type]
    yield from _once(_concat(move.target, move.part) for move in moves if move.part and move.part.verb == "concat")
    for theirs in dict.fromkeys(p.theirs for p in pairs if p.how == "stack"):
        yield stack(f"{theirs.pattern}/layer_{{i}}", into=_last(theirs.pattern), axis=0, levels=2)


def _moves(pairs: list[Pair]) -> Iterator[_Move]:
    """Patterns move together, leaf by leaf where a pattern would match others too."""
    apart = {column for p in pairs if not (p.ours.is_exact and p.theirs.is_exact) for column in (p.ours, p.theirs)}
    for p in pairs:
        is_apart = p.ours in apart or p.theirs in apart
        count = max(len(p.ours.names), len(p.theirs.names))
        sources = _places(p.ours, p.how == "unstack", count if is_apart else 0)
        targets = _places(p.theirs, p.how == "stack", count if is_apart else 0)
        for source, target in zip(sources, targets, strict=True):
            yield _Move(source, target, p.layout, wanted_shape(p), p.part)


def _places(column: Column, is_stacked: bool, count: int) -> list[str]:
    """A column as one pattern, or as `count` leaves; where it is stacked, what its layers are called meanwhile."""
    if not count:
        return [f"{column.pattern}/layer_{{i}}" if is_stacked else column.pattern]
    return [f"{column.pattern}/layer_{number}" for number in range(count)] if is_stacked else list(column.names)


def wanted_shape(p: Pair) -> tuple[int, ...]:
    """The shape that a layout makes."""
    whole = p.theirs.shape[1:] if p.how == "stack" else p.theirs.shape
    if p.part is None or p.part.verb == "split":
        return whole
    axis, sizes = p.part.cut
    return (*whole[:axis], sizes[p.part.number], *whole[axis + 1 :])


def _once(rules: Iterable[Any]) -> Iterable[Any]:
    return dict.fromkeys(rules)


def _source(move: _Move) -> str:
    return f"{move.source}/{move.part.number}" if move.part and move.part.verb == "split" else move.source


def _target(move: _Move) -> str:
    return f"{move.target}/{move.part.number}" if move.part and move.part.verb == "concat" else move.target


def _split(source: str, part: Part) -> Any:
    into = [f"{_last(source)}/{number}" for number in range(len(part.cut.sizes))]
    return split(source, into=into, axis=part.cut.axis, sizes=_named(part))


def _concat(target: str, part: Part) -> Any:
    parts = [f"{target}/{number}" for number in range(len(part.cut.sizes))]
    return concat(parts, into=_last(target), axis=part.cut.axis, sizes=_named(part), levels=2)


def _named(part: Part) -> list[int] | None:
    """Sizes that are not equal, or that a concat needs to be undone."""
    return None if len(set(part.cut.sizes)) == 1 and part.verb == "split" else list(part.cut.sizes)


def _in_the_way(left: Iterable[str], pairs: list[Pair]) -> list[str]:
    """Leaves that no pair is about, where a pair makes a leaf of that name, above it or below it."""
    made = {parse_path(name) for p in pairs for name in p.theirs.names}
    above = {path[:k] for path in made for k in range(1, len(path))}
    return [name for name in left if (path := parse_path(name)) in above or made & _heads(path)]


def _heads(path: KeyPath) -> set[KeyPath]:
    return {path[:k] for k in range(1, len(path) + 1)}


def _last(pattern: str) -> str:
    return pattern_segments(compile_pattern(pattern))[-1]
