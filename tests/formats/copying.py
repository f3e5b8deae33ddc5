"""Copy a source into a sink, leaf by leaf, and compare sources by their bits; a tree of arrays as a source."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orbaxkit.formats import Done, Pending, Source, Value
from orbaxkit.formats.items import ItemSource
from orbaxkit.formats.sinks import Encoded, Sink, Spans
from orbaxkit.paths import KeyPath
from orbaxkit.specs import LeafSpec, Specs


@dataclass(frozen=True)
class TreeSource:
    """Values in memory, by typed path: arrays, Python numbers, strings, None."""

    leaves: Mapping[KeyPath, Any]
    changes: Mapping[KeyPath, LeafSpec] | None = None  # specs other than those of the values
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = None

    @property
    def specs(self) -> Specs:
        return Specs.of([(path, (self.changes or {}).get(path) or spec_of(v)) for path, v in self.leaves.items()])

    def _at(self, name: str) -> Any:
        return self.leaves[self.specs.paths[name]]

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        out[...] = self._at(name)[index]
        return Done()

    def value(self, name: str) -> Value:
        return self._at(name)

    def problems(self, names: Any) -> list[tuple[str, str]]:
        return []


def spec_of(value: Any) -> LeafSpec:
    if value is None:
        return LeafSpec(kind="empty", empty="None")
    if isinstance(value, str):
        return LeafSpec(kind="string", stored_bytes=len(value.encode()))
    if isinstance(value, np.ndarray):
        return LeafSpec(value.shape, value.dtype, "numpy")
    return LeafSpec(dtype=np.asarray(value).dtype, kind="scalar")


def save(source: Source, sink: Sink, tied: Mapping[str, str] | None = None, **how: Any) -> Path:
    """Write a whole source."""
    sink.begin(source.specs, tied)
    copy(source, sink, **how)
    return sink.close()


def copy(source: Source, sink: Sink, *, encoded: bool = False, reverse: bool = False) -> None:
    """Write every leaf of a source into a sink that was begun; in reverse order, or as encoded values where it can."""
    for name in list(source.specs)[:: -1 if reverse else 1]:
        copy_leaf(source, sink, name, encoded)


def copy_leaf(source: Source, sink: Sink, name: str, encoded: bool = False) -> None:
    spec = source.specs[name]
    if spec.kind in ("scalar", "string"):
        sink.value(name, source.value(name))
        return
    place = source.places[name] if encoded and isinstance(source, ItemSource) else None
    if place is not None and place.array is not None and sink.accepts_encoded(name, place.array):
        for key, value in source.store.values(place.name).items():
            with source.store.open(value) as file:
                sink.write_encoded(name, key, Encoded(value.length, file, value.offset))
        return
    for spans in sink.parts(name):
        sink.write(name, spans, read(source, name, spans))


def read(source: Source, name: str, spans: Spans | None = None) -> np.ndarray:
    """A leaf's stored array, or a part of it."""
    spec = source.specs[name]
    spans = tuple((0, size) for size in spec.data_shape) if spans is None else spans
    out = np.empty([b - a for a, b in spans], spec.dtype)
    source.read(name, tuple(slice(*span) for span in spans), out).result()
    return out


def assert_same(a: Source, b: Source) -> None:
    """The same paths, kinds, shapes, dtypes and bits."""
    assert list(a.specs.paths.values()) == list(b.specs.paths.values())
    for name in a.specs:
        left, right = a.specs[name], b.specs[name]
        facts = [(s.shape, s.dtype, s.kind, s.key_impl, s.empty, s.data_shape) for s in (left, right)]
        assert facts[0] == facts[1], name
        if left.kind in ("scalar", "string"):
            assert repr(a.value(name)) == repr(b.value(name)), name
        elif left.kind != "empty":
            assert read(a, name).tobytes() == read(b, name).tobytes(), name
