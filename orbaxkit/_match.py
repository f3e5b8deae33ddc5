"""Match: propose the rules between two trees."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbaxkit._plan import open_source
from orbaxkit.display.text import align, counted
from orbaxkit.errors import TargetError, TransformError, shown
from orbaxkit.execute.gather import on_host
from orbaxkit.formats import Source
from orbaxkit.matching.columns import Column, columns_of
from orbaxkit.matching.layouts import sizes_of
from orbaxkit.matching.pairing import pair
from orbaxkit.matching.pairs import Open, Pair, Part, counts
from orbaxkit.matching.rules import rules_of, wanted_shape
from orbaxkit.paths import format_path
from orbaxkit.planning import Transform
from orbaxkit.planning import expressions as ex
from orbaxkit.slots import find_slots, mirrored_root
from orbaxkit.specs import Specs
from orbaxkit.transforms import chain
from orbaxkit.transforms.layout import rearrange

_MOST_HELD = 16


@dataclass(frozen=True)
class Match:
    """What `match` proposes: `pairs`, each with how sure it is and why, `open` questions, and what is left over."""

    pairs: tuple[Pair, ...]
    open: tuple[Open, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    following: tuple[str, ...] = ()  # optimizer slots of `a`: what the rules do to params, they do to these

    @property
    def casts(self) -> dict[str, str]:
        """The dtypes that `b` has and the rules do not make, as `ok.cast` takes them; casting is for you to decide."""
        return {
            pattern: str(p.theirs.dtype)
            for p in self.pairs
            if p.ours.dtype != p.theirs.dtype
            for pattern in ([p.theirs.pattern] if p.theirs.is_exact else p.theirs.names)
        }

    @property
    def transform(self) -> Transform:
        """The rules as one transform from `a` to `b`; what is open or left over is not in it."""
        return chain(*self._rules())

    def to_json(self) -> dict[str, Any]:
        """Plain data: the transform as `ok.from_json` reads it, and everything that is to be known about it."""
        return {
            "transform": chain(*self._rules()).to_json(),
            "rules": [_rule_json(p) for p in self.pairs],
            "open": [{"from": o.ours, "candidates": list(o.candidates), "why": o.why} for o in self.open],
            "casts": self.casts,
            "following": list(self.following),
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
        }

    def __str__(self) -> str:
        told = counts(self.pairs)
        lines = [", ".join(f"{n:,} {sure}" for sure, n in told.items()) or "nothing matches"]
        rows = [(p.ours.pattern, "->", p.theirs.pattern, _how(p), p.sure, p.why) for p in self.pairs]
        lines += align([tuple(map(shown, row)) for row in rows], [False] * 6) if rows else []
        lines += [f"open: {shown(o.ours)}: {o.why}: {shown(', '.join(o.candidates))}" for o in self.open]
        for label, names in (("a", self.only_in_a), ("b", self.only_in_b)):
            if names:
                lines.append(f"only in {label}, {counted(len(names), 'leaf', 'leaves')}: {shown(', '.join(names[:8]))}")
        if self.following:
            lines.append(f"{counted(len(self.following), 'leaf', 'leaves')} of optimizer slots follow their params")
        if self.casts:
            lines.append(f"other dtypes: to cast is up to you: ok.cast({self.casts!r})")
        if self.pairs:
            lines += ["", *_python(self._rules())]
        return "\n".join(lines)

    def _rules(self) -> Iterator[Any]:
        return rules_of(self.pairs, self.only_in_a)


def _rule_json(p: Pair) -> dict[str, Any]:
    told: dict[str, Any] = {"layout": p.layout, "how": p.how, "sure": p.sure, "why": p.why}
    if p.part is not None:
        axis, sizes = p.part.cut
        told["part"] = {"verb": p.part.verb, "axis": axis, "sizes": list(sizes), "number": p.part.number}
    return {"from": p.ours.pattern, "to": p.theirs.pattern, **told}


def _how(p: Pair) -> str:
    return ", ".join(filter(None, (p.how, p.part.verb if p.part else "", p.layout)))


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
    followed = _followers(ours.specs), _followers(theirs.specs)
    columns = columns_of(ours.specs, followed[0]), columns_of(theirs.specs, followed[1])
    if values:
        _refuse_unreadable(ours, columns[0])
        _refuse_unreadable(theirs, columns[1])
    found = pair(*columns, _Digests(ours, theirs) if values else None)
    return Match(
        tuple(sorted(found.pairs, key=lambda p: p.ours.order)),
        tuple(found.open),
        tuple(name for column in found.ours for name in column.names),
        tuple(name for column in found.theirs for name in column.names),
        tuple(followed[0]),
    )


def _followers(specs: Specs) -> list[str]:
    """Leaves of optimizer slots whose params are in the tree: rules for params are rules for them."""
    slots = find_slots(specs)
    base = mirrored_root(specs, slots)
    if base is None:
        return []
    mirrored = (
        (name, slot.param_of(specs, name)) for slot in slots for names in slot.mirrors.values() for name in names
    )
    return [name for name, param in mirrored if format_path((*base, *param)) in specs.leaves]


def _refuse_unreadable(source: Source, columns: Iterable[Column]) -> None:
    problems = source.problems([name for column in columns for name in column.names])
    if problems:
        hint = "without values=True, specs are enough"
        raise TargetError("these leaves have no values to compare", leaves=problems, hint=hint)


class _Digests:
    """What columns hold, as digests; an array is read when its column's turn comes, and the last ones are kept."""

    def __init__(self, ours: Source, theirs: Source):
        self._sources = ours, theirs
        self._known: dict[tuple[Any, ...], bytes] = {}
        self._held: dict[tuple[int, Column], list[np.ndarray]] = {}

    def made(self, p: Pair) -> bytes:
        """What a pair makes of ours."""
        part = p.part if p.part and p.part.verb == "split" else None
        shape = wanted_shape(p)
        key = (0, p.ours, p.how, p.layout, shape, part)
        if key not in self._known:
            layers = self._arrays(0, p.ours)
            layers = list(layers[0]) if p.how == "unstack" else layers
            self._known[key] = _digest(_moved(_cut(x, part), p.layout, shape) for x in layers)
        return self._known[key]

    def wanted(self, p: Pair) -> bytes:
        """What theirs holds, of which a pair may make a part."""
        part = p.part if p.part and p.part.verb == "concat" else None
        key = (1, p.theirs, p.how, part)
        if key not in self._known:
            layers = self._arrays(1, p.theirs)
            layers = list(layers[0]) if p.how == "stack" else layers
            self._known[key] = _digest(_cut(x, part) for x in layers)
        return self._known[key]

    def _arrays(self, side: int, column: Column) -> list[np.ndarray]:
        if (side, column) not in self._held:
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            source = self._sources[side]
            self._held[side, column] = on_host([ex.read(name, source.specs[name]) for name in column.names], source)
        return self._held[side, column]


def _digest(layers: Iterable[np.ndarray]) -> bytes:
    """Of bytes alone: shapes and dtypes are compared before."""
    out = hashlib.sha256()
    for layer in layers:
        out.update(np.ascontiguousarray(layer).tobytes())
    return out.digest()


def _cut(x: np.ndarray, part: Part | None) -> np.ndarray:
    if part is None:
        return x
    start = sum(part.cut.sizes[: part.number])
    return x[(slice(None),) * part.cut.axis + (slice(start, start + part.cut.sizes[part.number]),)]


def _moved(x: np.ndarray, layout: str, wanted: tuple[int, ...]) -> np.ndarray:
    if not layout:
        return np.ascontiguousarray(x)
    from orbaxkit.planning.host import evaluate

    return np.ascontiguousarray(evaluate(rearrange(ex.fill(x), layout, sizes_of(layout, wanted)), _no_read))


def _no_read(leaf: Any) -> np.ndarray:
    raise TransformError(f"{leaf.name} is not to be read here")


def _python(rules: Iterable[Any]) -> list[str]:
    return ["transform = ok.chain(", *(f"    ok.{rule!r}," for rule in rules), ")"]
