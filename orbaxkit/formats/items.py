"""An opened item: its leaves resolved to arrays in a store, values in a msgpack file, strings, or nothing at all."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Done, Pending, Source, Value
from orbaxkit.formats.arrays import Reader
from orbaxkit.formats.decoding import Decoder, touched_values
from orbaxkit.formats.eras import fills_missing_chunks
from orbaxkit.formats.files import Folder
from orbaxkit.formats.msgpack import Node, StoredArray, read_into
from orbaxkit.formats.ocdbt import UNKNOWN
from orbaxkit.formats.ocdbt import Value as StoredValue
from orbaxkit.formats.stores import ArrayStore, announce
from orbaxkit.formats.values import scalar_value
from orbaxkit.formats.zarr import ZarrArray, missing_key
from orbaxkit.specs import LeafSpec, Specs


@dataclass(frozen=True, slots=True)
class Place:
    """Where a leaf's value lies: an array by its stored name, a string, a msgpack value; or why it lies nowhere."""

    spec: LeafSpec
    name: str = ""
    array: ZarrArray | None = None
    text: str | None = None
    inline: Node = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """An array as it lies in its store: what it is, where each stored value lies, and how to get at the bytes."""

    array: ZarrArray
    values: Mapping[str, StoredValue]
    open: Callable[[StoredValue], AbstractContextManager[Any]]
    folder: Folder  # that the values' files are relative to


@dataclass(frozen=True)
class ItemSource:
    """A `Source` over one item. `inline_file` is the msgpack file in its folder that holds inline values."""

    folder: Folder
    specs: Specs
    places: Mapping[str, Place]
    store: ArrayStore | None = None
    inline_file: str = "checkpoint"
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = None
    _checked: dict[str, str | None] = field(default_factory=dict, repr=False)

    @cached_property
    def _reader(self) -> Reader:
        if self.store is None:
            raise CheckpointError("there are no array bytes here", where=self.folder.path)
        return Reader(self.store)

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._reader.store)

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Start reading a region; a leaf whose chunks or data files are missing is refused before it is read."""
        place = self.places[name]
        if isinstance(place.inline, StoredArray):
            with self.folder.open(self.inline_file) as file:
                read_into(file, place.inline, index, out, self.folder.where(self.inline_file))
            return Done()
        if place.inline is not None:
            out[...] = np.frombuffer(place.inline, np.uint8)[index] if isinstance(place.inline, bytes) else place.inline
            return Done()
        problem = self._problem(name)
        if problem or place.array is None:
            raise CheckpointError(
                "a leaf cannot be read", leaves=[(name, problem or "no array")], where=self.folder.path
            )
        array, has_fill = place.array, self._has_fill(place.array)

        def by_tensorstore() -> Pending:
            return self._reader.read(name, place.name, array, has_fill, index, out)

        started = self._decoder.read(name, place.name, array, index, out, by_tensorstore if has_fill else None)
        return started or by_tensorstore()

    def value(self, name: str) -> Value:
        """A string, or a Python or numpy number."""
        place = self.places[name]
        if place.text is not None:
            return place.text
        if place.inline is not None and not isinstance(place.inline, StoredArray):
            return place.inline
        if place.spec.dtype is None:
            raise CheckpointError("a leaf cannot be read", leaves=[(name, place.problem or "")], where=self.folder.path)
        out = np.empty((), place.spec.dtype)
        self.read(name, (), out).result()
        return scalar_value(out)

    def stored(self, name: str) -> Stored | None:
        """Where an array's stored values lie; None for leaves that are not in the store."""
        place = self.places[name]
        if place.array is None or self.store is None or place.inline is not None:
            return None
        values, store = self.store.values(place.name), self.store
        return Stored(place.array, values, store.open, store.folder)

    def expect(self, wanted: Iterable[tuple[str, tuple[slice, ...]]]) -> None:
        """Announce regions of leaves that will be read, so that an object store is asked for neighbours together."""
        if self.store is not None:
            announce(
                self.store.folder,
                (
                    value
                    for name, index in wanted
                    if (array := self.places[name].array) is not None
                    for value in touched_values(self.store.values(self.places[name].name), array, index)
                ),
            )

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Missing metadata, missing chunks, data files that are missing or too short."""
        found = ((name, self._problem(name)) for name in names)
        return [(name, problem) for name, problem in found if problem]

    def _problem(self, name: str) -> str | None:
        if name not in self._checked:
            self._checked[name] = self._find_problem(self.places[name])
        return self._checked[name]

    def _find_problem(self, place: Place) -> str | None:
        if place.problem or place.array is None or self.store is None:
            return place.problem
        try:
            lengths = {key: value.length for key, value in self.store.values(place.name).items()}
            return self._bad_chunk(place.name, place.array, lengths) or self.store.damage(place.name)
        except CheckpointError as error:
            return str(error).split("\n")[0]

    def _bad_chunk(self, stored: str, array: ZarrArray, lengths: dict[str, int]) -> str | None:
        key = None if self._has_fill(array) else missing_key(array, set(lengths))
        if key is not None:
            return f"chunk {key} of {stored!r} is missing"
        whole = array.value_bytes
        is_raw = array.codec == "raw" and array.shard_shape is None
        wrong = next((key for key, length in lengths.items() if is_raw and length not in (whole, UNKNOWN)), None)
        return f"chunk {wrong} of {stored!r} has {lengths[wrong]:,} of {whole:,} bytes" if wrong else None

    def _has_fill(self, array: ZarrArray) -> bool:
        return fills_missing_chunks(array, self.settings)


def expect(source: Source, wanted: Iterable[tuple[str, tuple[slice, ...]]]) -> None:
    """Announce what will be read, to a source that has use for it."""
    announce = getattr(source, "expect", None)
    if announce is not None:
        announce(wanted)


def stored(source: Source, name: str) -> Stored | None:
    """Where a leaf's stored values lie; None where the source keeps it in some other way."""
    find = getattr(source, "stored", None)
    return None if find is None else find(name)
