"""Stand-ins for an opened checkpoint: real specs, and the facts that a header shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orbaxkit.paths import KeyPath
from orbaxkit.specs import DTYPES, LeafSpec, Specs


@dataclass(frozen=True)
class Facts:
    """What `formats` finds out about a path."""

    path: str = "/runs/pi0"
    format: str = "orbax"
    step: int | None = None
    step_name: str | None = None
    steps: tuple[tuple[int, str], ...] = ()
    unfinished: tuple[str, ...] = ()
    items: Mapping[str, str] = field(default_factory=lambda: {"default": "/runs/pi0/default"})
    other_items: Mapping[str, str] = field(default_factory=dict)
    is_finished: bool = True
    writer: str | None = None


@dataclass(frozen=True)
class Opened:
    """What `open` gives, as far as it is displayed."""

    specs: Specs
    layout: Facts = Facts()
    notes: tuple[str, ...] = ()
    several: Mapping[str, Specs] = field(default_factory=dict)

    @property
    def writer(self) -> str | None:
        """Which releases write files like these."""
        return self.layout.writer

    @property
    def items(self) -> Mapping[str, Specs]:
        """The specs of every item."""
        return self.several or dict.fromkeys(self.layout.items, self.specs)


def array(*shape: int, dtype: str = "float32", **more: object) -> LeafSpec:
    """An array of this shape."""
    return LeafSpec(shape, DTYPES[dtype], **more)  # type: ignore[arg-type]


def tree(leaves: Mapping[str, LeafSpec]) -> Specs:
    """Specs by path text; numbers are sequence indices."""

    def path(text: str) -> KeyPath:
        return tuple(int(part) if part.isdigit() else part for part in text.split("/"))

    return Specs.of([(path(text), spec) for text, spec in leaves.items()])
