"""Open a checkpoint: what it is and what it holds, lazily and without jax, flax or Orbax."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from orbaxkit._describe import Description, describe
from orbaxkit.errors import CheckpointError, CheckpointWarning, shorten
from orbaxkit.formats import Pending, Source, Value
from orbaxkit.formats.detect import Layout, load, locate
from orbaxkit.formats.items import Stored, expect, stored
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.specs import LeafSpec, Specs

_UNFINISHED = "this save was never finished: what is here may be incomplete"


def open_checkpoint(path: Any, *, step: int | None = None, item: str | None = None) -> "Checkpoint":
    """Open a checkpoint to look at it and to restore from it. Only metadata is read, and only once it is asked for.

    Args:
        path: the root of a run (its latest finished step is taken), a step, an item, or a file; a `str`, a
            `PathLike`, an Orbax `CheckpointManager` or v1 `training.Checkpointer`, or an opened `Checkpoint`.
        step: the step to take from a root.
        item: the item to narrow to; without it, several items are the first level of the tree.

    Raises:
        CheckpointError: there is no checkpoint, no such step or item, or its metadata is damaged.

    >>> ckpt = ok.open("runs/pi0", step=20000)
    >>> str(ckpt.specs["params/head/kernel"])
    'bfloat16[8, 2]'
    """
    if isinstance(path, Checkpoint):
        if step is None and item is None:
            return path
        path, item = path.layout.root if step is not None and path.layout.root else path.path, item or path.item
    if is_manager(path):
        path, step = path.directory, _latest_step(path) if step is None else step
    layout = locate(path, step)
    if item is not None and item not in layout.items:
        raise _no_such_item(layout, item)
    if not layout.is_finished:
        warnings.warn(f"{layout.path}: {_UNFINISHED}", CheckpointWarning, stacklevel=2)
    return Checkpoint(layout, item)


def is_manager(path: Any) -> bool:
    """Whether this is Orbax's `CheckpointManager`, or the `training.Checkpointer` of its v1 API."""
    return hasattr(path, "directory") and (hasattr(path, "latest_step") or hasattr(path, "latest"))


def _latest_step(manager: Any) -> int | None:
    if hasattr(manager, "latest_step"):
        found: int | None = manager.latest_step()
        return found
    return getattr(manager.latest, "step", None)


def _no_such_item(layout: Layout, item: str) -> CheckpointError:
    problem = "is no tree that can be opened" if item in layout.other_items else "is not here"
    known = ", ".join(shorten(layout.items)) or "none"
    return CheckpointError(f"the item {item!r} {problem}", where=layout.path, hint=f"items: {known}")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: where it lies (`layout`), what it holds (`specs`), where its bytes come from (`source`).

    >>> ckpt = ok.open("runs/pi0")
    >>> ckpt.format, ckpt.step, len(ckpt.specs)
    ('orbax', 20000, 13)
    """

    layout: Layout
    item: str | None = None  # the one item it was narrowed to

    @property
    def path(self) -> str:
        """The path that was opened, absolute."""
        return self.layout.path

    @property
    def format(self) -> str:
        """`orbax`, `flax_msgpack` or `array_metadatas`."""
        return self.layout.format

    @property
    def step(self) -> int | None:
        """The step that is open, if it has a number."""
        return self.layout.step

    @property
    def steps(self) -> tuple[int, ...]:
        """All finished steps of the run, where its root was opened."""
        return tuple(number for number, _ in self.layout.steps)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Saves that were begun and never finished."""
        return self.layout.unfinished

    @property
    def is_finished(self) -> bool:
        """Whether the save was finished, as far as its name tells."""
        return self.layout.is_finished

    @property
    def writer(self) -> str | None:
        """Which releases write files like these, as far as the files tell."""
        found = (source.writer for source in self._sources.values())
        return self.layout.writer or next((writer for writer in found if writer), None)

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        names = self.layout.items if self.item is None else [self.item]
        return _Lazy(tuple(names), self._load)

    def _load(self, item: str) -> Source:
        source = load(self.layout, item)
        for warning in source.warnings:
            warnings.warn(f"{self.layout.items[item]}: {warning}", CheckpointWarning, stacklevel=2)
        return source

    @cached_property
    def items(self) -> Mapping[str, Specs]:
        """The specs of each tree item, read as they are asked for."""
        return _Lazy(tuple(self._sources), lambda name: self._sources[name].specs)

    @cached_property
    def source(self) -> Source:
        """What the values are read from; several items are joined, their names the first level."""
        if not self._sources:
            raise CheckpointError(
                "no tree is here",
                where=self.path,
                hint=f"other items: {', '.join(shorten(self.layout.other_items)) or 'none'}",
            )
        if len(self._sources) == 1 and (self.item is not None or not self.layout.is_composite):
            return self._sources[next(iter(self._sources))]
        return join(self._sources)

    @property
    def specs(self) -> Specs:
        """Every leaf: path -> shape, dtype, kind, bytes, chunks, sharding."""
        return self.source.specs

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know: how it was saved, what had to be assumed."""
        unfinished = () if self.is_finished else (_UNFINISHED,)
        return (*unfinished, *self.layout.notes, *self.source.warnings, *self.source.notes)

    def describe(self, *, values: bool = False) -> Description:
        """What was recognised in the tree: scanned subtrees, optimizer states, frozen params, averages. Prints well.

        Of all arrays, only the counts of optimizers are read, one number each. `values` also reads every moment, block
        by block, and reports those that are not finite, or still zero after many steps.

        >>> print(ok.open("runs/pi0").describe())  # doctest: +SKIP
        scanned    params/Transformer/encoderblock: axis 0 (27 layers)
        """
        return describe(self.specs, self.notes, self.source, values=values)

    def __str__(self) -> str:
        from orbaxkit.display.table import render

        return render(self)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, format={self.format!r}, step={self.step}, items={list(self._sources)})"

    def _repr_html_(self) -> str:
        from orbaxkit.display.html import to_html

        return to_html(self)

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass(frozen=True)
class _Lazy(Mapping[str, Any]):
    """A mapping whose values are made when they are first asked for."""

    names: tuple[str, ...]
    make: Any
    _made: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(f"no item {name!r}; items: {', '.join(self.names)}")
        if name not in self._made:
            self._made[name] = self.make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class JoinedSource:
    """Several sources as one; `where` gives each leaf's source and its name there."""

    specs: Specs
    where: Mapping[str, tuple[Source, str]]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = None

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Start reading a region of a leaf."""
        source, inner = self.where[name]
        return source.read(inner, index, out)

    def value(self, name: str) -> Value:
        """The value of a scalar or a string."""
        source, inner = self.where[name]
        return source.value(inner)

    def expect(self, wanted: Iterable[tuple[str, tuple[slice, ...]]]) -> None:
        """Announce regions of leaves that will be read."""
        by_source: dict[int, tuple[Source, list[tuple[str, tuple[slice, ...]]]]] = {}
        for name, index in wanted:
            source, inner = self.where[name]
            by_source.setdefault(id(source), (source, []))[1].append((inner, index))
        for source, own in by_source.values():
            expect(source, own)

    def stored(self, name: str) -> Stored | None:
        """Where an array's stored values lie, if its source has a store."""
        source, inner = self.where[name]
        return stored(source, inner)

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """What is wrong with leaves, under their joined names."""
        found = ((name, self.where[name]) for name in names)
        return [(name, problem) for name, (source, inner) in found for _, problem in source.problems([inner])]


def join(sources: Mapping[str, Source]) -> JoinedSource:
    """Join items: each one's name is the first segment of its paths."""
    leaves: list[tuple[KeyPath, LeafSpec]] = []
    where: dict[str, tuple[Source, str]] = {}
    containers: dict[str, str] = {}
    for item, source in sources.items():
        for name, path in source.specs.paths.items():
            leaves.append(((item, *path), source.specs.leaves[name]))
            where[format_path((item, *path))] = source, name
        first = format_path((item,))
        containers |= {f"{first}/{inner}" if inner else first: kind for inner, kind in source.specs.containers.items()}
    found = list(sources.values())
    return JoinedSource(
        Specs.of(leaves, containers),
        where,
        notes=tuple(dict.fromkeys(note for source in found for note in source.notes)),
        warnings=tuple(dict.fromkeys(warning for source in found for warning in source.warnings)),
        writer=next((source.writer for source in found if source.writer), None),
    )
