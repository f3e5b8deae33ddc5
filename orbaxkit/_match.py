"""Match: propose the rules between two trees."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbaxkit._plan import open_source
from orbaxkit.display.text import align, counted
from orbaxkit.errors import TransformError, shown
from orbaxkit.execute.gather import on_host
from orbaxkit.formats import Source
from orbaxkit.matching.columns import Column, columns_of
from orbaxkit.matching.layouts import sizes_of
from orbaxkit.matching.pairing import Open, Pair, Pairing, Way, counts, pair
from orbaxkit.planning import Transform
from orbaxkit.planning import expressions as ex
from orbaxkit.transforms import chain, rename, reshape, stack, unstack
from orbaxkit.transforms.layout import rearrange


@dataclass(frozen=True)
class Match:
    """What `match` proposes: `pairs`, each with how sure it is and why, `open` questions, and what is left over."""

    pairs: tuple[Pair, ...]
    open: tuple[Open, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    @property
    def transform(self) -> Transform:
        """The rules as one transform from `a` to `b`; what is open or left over is not in it."""
        return chain(*_rules(self.pairs))

    def to_json(self) -> dict[str, Any]:
        """Plain data: the transform as `ok.from_json` reads it, and everything that is to be known about it."""
        return {
            "transform": chain(*_rules(self.pairs)).to_json(),
            "rules": [_rule_json(p) for p in self.pairs],
            "open": [{"from": o.ours, "candidates": list(o.candidates), "why": o.why} for o in self.open],
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
        }

    def __str__(self) -> str:
        told = counts(self.pairs)
        lines = [", ".join(f"{n:,} {sure}" for sure, n in told.items()) or "nothing matches"]
        rows = [(p.ours.pattern, "->", p.theirs.pattern, p.layout or p.how, p.sure, p.why) for p in self.pairs]
        lines += align([tuple(map(shown, row)) for row in rows], [False] * 6) if rows else []
        lines += [f"open: {shown(o.ours)}: {o.why}: {shown(', '.join(o.candidates))}" for o in self.open]
        for label, names in (("a", self.only_in_a), ("b", self.only_in_b)):
            if names:
                lines.append(f"only in {label}, {counted(len(names), 'leaf', 'leaves')}: {shown(', '.join(names[:8]))}")
        if self.pairs:
            lines += ["", *_python(self.pairs)]
        return "\n".join(lines)


def _rule_json(p: Pair) -> dict[str, str]:
    told = {"layout": p.layout, "how": p.how, "sure": p.sure, "why": p.why}
    return {"from": p.ours.pattern, "to": p.theirs.pattern, **told}


def match(a: Any, b: Any, *, values: bool = False) -> Match:
    """Propose the rules that turn one tree into another: names, layouts of axes, stacked layers.

    Only metadata is read: names are compared by their words and what frameworks call alike, shapes up to transposing,
    merging heads and stacking layers. Nothing ambiguous is resolved: it is listed as open. With `values`, both trees
    have the same values, and only what they prove bit for bit is taken.

    Args:
        a, b: paths, opened checkpoints, managers, or trees; of their leaves only arrays are matched.

    >>> found = ok.match(params, {"out": {"weight": jnp.ones((2, 8), jnp.bfloat16)}})
    >>> [(pair.ours.pattern, pair.theirs.pattern, pair.layout) for pair in found.pairs]
    [('head/kernel', 'out/weight', 'i o -> o i')]
    """
    _, ours, _ = open_source(a)
    _, theirs, _ = open_source(b)
    columns = columns_of(ours.specs), columns_of(theirs.specs)
    found: Pairing = pair(*columns, _prover(ours, theirs) if values else None)
    return Match(
        tuple(sorted(found.pairs, key=lambda p: p.ours.order)),
        tuple(found.open),
        tuple(name for column in found.ours for name in column.names),
        tuple(name for column in found.theirs for name in column.names),
    )


def _prover(ours: Source, theirs: Source) -> Any:
    """Compare the values of two columns, each array read once for as long as its column is looked at."""
    held: dict[tuple[bool, Column], list[np.ndarray]] = {}

    def arrays(source: Source, column: Column, is_ours: bool) -> list[np.ndarray]:
        if (is_ours, column) not in held:
            if len(held) > 64:
                held.clear()
            held[is_ours, column] = on_host([ex.read(name, source.specs[name]) for name in column.names], source)
        return held[is_ours, column]

    def prove(a: Column, b: Column, way: Way) -> bool:
        if a.dtype != b.dtype:
            return False
        left, right = arrays(ours, a, True), arrays(theirs, b, False)
        how, layout = way
        left = list(left[0]) if how == "unstack" else left
        right = list(right[0]) if how == "stack" else right
        return all(_moved(x, layout, y.shape).tobytes() == y.tobytes() for x, y in zip(left, right, strict=True))

    return prove


def _moved(x: np.ndarray, layout: str, wanted: tuple[int, ...]) -> np.ndarray:
    if not layout:
        return np.ascontiguousarray(x)
    from orbaxkit.planning.host import evaluate

    return np.ascontiguousarray(evaluate(rearrange(ex.fill(x), layout, sizes_of(layout, wanted)), _no_read))


def _no_read(leaf: Any) -> np.ndarray:
    raise TransformError(f"{leaf.name} is not to be read here")


def _rules(pairs: tuple[Pair, ...]) -> Iterator[Any]:
    """Cut what is stacked, lay out, rename, stack what is to be."""
    for p in pairs:
        if p.how == "unstack":
            yield unstack(p.ours.pattern, into=f"{_last(p.ours.pattern)}/{{i}}", axis=0)
    for p in pairs:
        if p.layout:
            yield reshape(_cut(p), p.layout, **sizes_of(p.layout, _wanted(p)))
    moved = {_cut(p): _target(p) for p in pairs if _cut(p) != _target(p)}
    if moved:
        yield rename(moved)  # type: ignore[arg-type]
    for p in pairs:
        if p.how == "stack":
            yield stack(_target(p), into=_last(p.theirs.pattern), axis=0, levels=2)


def _wanted(p: Pair) -> tuple[int, ...]:
    return p.theirs.shape[1:] if p.how == "stack" else p.theirs.shape


def _cut(p: Pair) -> str:
    return f"{p.ours.pattern}/{{i}}" if p.how == "unstack" else p.ours.pattern


def _target(p: Pair) -> str:
    return f"{p.theirs.pattern}/{{i}}" if p.how == "stack" else p.theirs.pattern


def _last(pattern: str) -> str:
    return pattern.rsplit("/", 1)[-1]


def _python(pairs: tuple[Pair, ...]) -> list[str]:
    rules = [f"    ok.{rule!r}," for rule in _rules(pairs)]
    return ["transform = ok.chain(", *rules, ")"]
