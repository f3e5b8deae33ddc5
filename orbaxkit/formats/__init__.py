"""One module per format on disk, each giving a `Source`: what a checkpoint holds, and its values on demand."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from orbaxkit.specs import Specs

# Of scalars and strings; TensorFlow has arrays of strings too, and strings that are no text.
Value = int | float | complex | bool | str | bytes | np.generic | np.ndarray


@runtime_checkable
class Pending(Protocol):
    """A read that was started."""

    def result(self) -> object:
        """Wait until the bytes are there; a read that fails raises `CheckpointError` here."""


@runtime_checkable
class Source(Protocol):
    """An opened tree: its specs, and its values where they are asked for."""

    @property
    def specs(self) -> Specs:
        """What is known without reading array bytes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, for people: the saved mesh, parts that were never merged."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What had to be assumed because it is not on disk."""

    @property
    def writer(self) -> str | None:
        """Which releases write files like these, as far as the files tell."""

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Start reading a region (start/stop slices, step 1, within `data_shape`) into `out`.

        `out` is C-contiguous, of the stored dtype and of the region's shape.
        """

    def value(self, name: str) -> Value:
        """The value of a leaf of kind `scalar` or `string`."""

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """`(leaf, what is wrong)` for leaves that cannot be read, found without reading array bytes."""


def part_of(array: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """A view of the part between (start, stop) along each axis; the ellipsis makes it a view of a 0-d array too."""
    index: Any = (*(slice(start, stop) for start, stop in spans), ...)
    return array[index]


@dataclass(frozen=True, slots=True)
class Done:
    """A read that is finished already."""

    def result(self) -> None:
        """Nothing to wait for."""
