"""What a checkpoint is written through: one `Sink` per format.

The leaves are announced first, then given part by part; nothing stands at the destination until `close`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Value
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.specs import Specs

Spans = tuple[tuple[int, int], ...]

# A part of a leaf holds about this many bytes at most, so that a leaf of any size can be written.
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A stored value as it lies in a source: `length` bytes of an open file (or of `bytes`) from `offset` on."""

    length: int
    file: Any
    offset: int = 0
    where: str = ""  # the file's path, for errors


def text_of(name: str, value: Value | None) -> str:
    """The value of a string leaf. Raises CheckpointError: bytes that are no text, which TensorFlow has."""
    if isinstance(value, str):
        return value
    raise CheckpointError("a string that is no text", leaves=[(name, f"is a {type(value).__name__}: drop it")])


@runtime_checkable
class Sink(Protocol):
    """A checkpoint being written.

    `begin` comes first, `close` or `abort` last. Leaves come in any order, and so do the stored values of a leaf;
    only the parts of one stored value come in the order of `parts`. Different leaves may be written by several threads.
    """

    def begin(self, specs: Specs, tied: Mapping[str, str] | None = None) -> None:
        """Announce every leaf: its path, shape, dtype and kind, and by `chunk_shape` how it is best laid out.

        `tied` says of which other leaf a leaf is the same array. What the format cannot hold, and a destination that
        stands or has no room, is refused here, before anything is written.
        """

    def parts(self, name: str) -> Iterator[Spans]:
        """The parts of an array leaf to write, within its `data_shape`; the words of PRNG keys are never split.

        None for leaves without bytes, for those that go through `value`, and for tied ones where ties are kept.
        """

    def write(self, name: str, spans: Spans, data: np.ndarray) -> None:
        """One of those parts, in the leaf's dtype and of any strides; it may be reused as soon as this returns."""

    def accepts_encoded(self, name: str, array: ZarrArray) -> bool:
        """Whether stored values of this leaf's shape, dtype, grid and codec can be taken as they are.

        `array` is what the leaf would be if its values came from there: for a layer out of chunks of one layer each,
        the array without that axis. A stored value that the source leaves out, for zeros, is written by its parts.
        """

    def write_encoded(self, name: str, key: str, value: Encoded) -> None:
        """A whole stored value as it is, under the key that it has in the leaf; instead of that value's parts."""

    def value(self, name: str, value: Value | None) -> None:
        """The value of a scalar or a string; empty leaves need none."""

    def close(self) -> PurePath:
        """Finish every file, put the checkpoint in its place, and say where that is."""

    def abort(self) -> None:
        """Remove what was written; a destination that stood before is as it was. May be called at any time."""


@runtime_checkable
class SharedSink(Sink, Protocol):
    """A sink that several processes fill, each stored value by one of them. The first takes the scalars and strings."""

    def stored_values(self, name: str) -> Mapping[str, int]:
        """The stored values of an array leaf in the order of `parts`: the bytes that each holds decoded, by its key."""

    def parts_of(self, name: str, key: str) -> Iterator[Spans]:
        """Those of the `parts` that make one stored value."""

    def assign(self, keys: Mapping[str, Collection[str]]) -> None:
        """Which stored values come from this process; all others from another one."""
