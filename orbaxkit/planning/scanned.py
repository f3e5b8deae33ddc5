"""Which subtrees are stacks of layers, seen from shapes alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orbaxkit.paths import KeyPath, format_path
from orbaxkit.specs import LeafSpec, Specs


@dataclass(frozen=True, slots=True)
class Scanned:
    """A subtree that looks scanned over layers: `candidates` are the axes it can be, each with its number of layers.

    One candidate is what `unstack` takes when no axis is named; of several one must be named.
    """

    path: str
    leaves: int
    candidates: tuple[tuple[int, int], ...]

    @property
    def axis(self) -> int | None:
        """The layer axis, where only one can be it."""
        return self.candidates[0][0] if len(self.candidates) == 1 else None

    @property
    def layers(self) -> int | None:
        """How many layers, where the axis is known."""
        return self.candidates[0][1] if len(self.candidates) == 1 else None

    def __str__(self) -> str:
        return f"{self.path}: {candidates_text(self.candidates)}"


def axis_candidates(shapes: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Axes, counted from the front, that every shape has with one same size: `(axis, size)`.

    >>> axis_candidates([(8, 4, 16), (8, 4)])
    ((0, 8), (1, 4))
    """
    shapes = list(shapes)
    least = min((len(shape) for shape in shapes), default=0)
    return tuple((a, shapes[0][a]) for a in range(least) if len({shape[a] for shape in shapes}) == 1)


def candidates_text(candidates: Iterable[tuple[int, int]]) -> str:
    """`axis 0 (8 layers) or axis 1 (4 layers)`."""
    return " or ".join(f"axis {axis} ({size} layers)" for axis, size in candidates) or "no axis"


def find_scanned(specs: Specs) -> list[Scanned]:
    """The outermost subtrees whose leaves share a layer axis; candidates are those that `unstack` chooses from.

    Of nodes around one and the same set of leaves the innermost is named. Shapes alone cannot tell a scanned subtree
    from layers that happen to agree, so only clear cases are reported: arrays not all of one rank, each with an axis
    left once the layer axis is gone, two layers or more, and of two arrays alone (a gated MLP: `[2, d, f]` and
    `[f, d]`) only those that agree on axis 0.
    """
    below: dict[KeyPath, list[LeafSpec]] = {}
    for name, spec in specs.leaves.items():
        if spec.kind in ("array", "numpy", "scalar"):
            path = specs.paths[name]
            for k in range(1, len(path)):
                below.setdefault(path[:k], []).append(spec)
    found: dict[KeyPath, Scanned] = {}
    wrappers = {path[:-1] for path in below if len(below[path]) == len(below.get(path[:-1], ()))}
    for path in sorted(below, key=len):
        if any(path[:k] in found for k in range(1, len(path))) or path in wrappers:
            continue
        candidates = _clear_candidates(below[path])
        if candidates:
            found[path] = Scanned(format_path(path), len(below[path]), candidates)
    return [found[path] for path in below if path in found]


def _clear_candidates(specs: list[LeafSpec]) -> tuple[tuple[int, int], ...]:
    ranks = {len(spec.shape) for spec in specs if spec.dtype is None or spec.dtype.kind not in "biu"}
    if len(ranks) < 2 or min(ranks) < 2:
        return ()
    found = axis_candidates(spec.shape for spec in specs)
    if all(size < 2 for _, size in found):
        return ()
    return found if len(specs) > 2 or found[0][0] == 0 else ()
