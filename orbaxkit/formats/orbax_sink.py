"""Write an Orbax item: a native OCDBT store and the files around it, as Orbax's newest releases write them."""

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from threading import Lock
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Source, Value
from orbaxkit.formats.classify import COMMIT, is_item
from orbaxkit.formats.detect import DEFAULT_ITEM, absolute_path
from orbaxkit.formats.files import check_name, folder_at
from orbaxkit.formats.ocdbt import PART_PREFIX
from orbaxkit.formats.ocdbt_writer import OcdbtWriter, merge
from orbaxkit.formats.orbax_documents import (
    array_metadatas_document,
    checkpoint_document,
    is_jax,
    sharding_document,
    stored_name,
    strings_document,
    tree_document,
    tree_key,
    zarr_document,
)
from orbaxkit.formats.processes import Processes
from orbaxkit.formats.sidecars import ARRAY_METADATAS, SHARDING, STRINGS
from orbaxkit.formats.sinks import PART_BYTES, Encoded, Spans, text_of
from orbaxkit.formats.staging import Staging, copy_beside, write_file, writing
from orbaxkit.formats.structure import METADATA
from orbaxkit.formats.value_stream import ValueStream, region, value_parts
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.specs import LeafSpec, Specs

# What TensorStore cannot store.
_FOREIGN_DTYPES = {"uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"}
# A leaf without a wish is one chunk, as Orbax has it on one device, up to this.
_CHUNK_BYTES = 1 << 30
_OVERHEAD_BYTES = 1 << 20  # of an otherwise empty checkpoint, generously
_OVERHEAD_PER_LEAF = 1024


@dataclass(frozen=True)
class OrbaxSettings:
    """How an item is stored: `driver` is `zarr` (version 2) or `zarr3`, `codec` `zstd` or `raw`."""

    driver: str = "zarr"
    codec: str = "zstd"
    custom_metadata: Any = None


def settings_of(source: Source) -> OrbaxSettings:
    """How a source's arrays are stored, so that a copy is stored alike; Orbax's defaults where it is no Orbax item."""
    parts: list[Any] = [inner for inner, _ in getattr(source, "where", {}).values()] or [source]
    for part in {id(part): part for part in parts}.values():
        kept = getattr(part, "orbax_settings", None)
        if isinstance(kept, OrbaxSettings):
            return kept
        places = getattr(part, "places", {}).values()
        arrays = [place.array for place in places if getattr(place, "array", None) is not None]
        if arrays:
            codec = Counter(array.codec for array in arrays).most_common(1)[0][0]
            return OrbaxSettings(arrays[0].driver, codec or "zstd", part.settings.get("custom_metadata"))
    return OrbaxSettings()


@dataclass
class _Leaf:
    """One leaf on its way: its layout, and the stored values that are still to come."""

    name: str  # its stored name
    spec: LeafSpec
    array: ZarrArray | None = None
    missing: int = 0
    streams: dict[tuple[int, ...], ValueStream] = field(default_factory=dict)

    @cached_property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """Where each stored value lies in the grid, by its key."""
        return {} if self.array is None else {self.array.key(at): at for at in np.ndindex(*self.array.grid)}


@dataclass
class OrbaxSink:
    """A `Sink` for an Orbax item at `path`, or with `as_step` for the item `default` of that step of the run at `path`.

    Leaves keep the chunks and shards of their specs; one without is a single chunk.
    """

    path: str | os.PathLike[str]
    settings: OrbaxSettings = OrbaxSettings()
    as_step: int | None = None
    overwrite: bool = False
    part_bytes: int = PART_BYTES
    beside: Mapping[str, str] = field(default_factory=dict)  # names and paths of what else lies in the step
    processes: Processes = field(default_factory=Processes)
    _specs: Specs = field(init=False, default_factory=lambda: Specs({}, {}))
    _leaves: dict[str, _Leaf] = field(init=False, default_factory=dict)
    _strings: dict[str, str] = field(init=False, default_factory=dict)
    _staging: Staging | None = field(init=False, default=None)
    _store: OcdbtWriter | None = field(init=False, default=None)
    _started: int = field(init=False, default=0)
    _lock: Lock = field(init=False, default_factory=Lock)

    def begin(self, specs: Specs, tied: Mapping[str, str] | None = None) -> None:
        """Announce every leaf. Orbax has no ties: both leaves are written.

        Raises CheckpointError: leaves that Orbax cannot store or that share a stored name, all named; a destination
        that stands, or too little room on its disk.
        """
        self._leaves = {name: self._leaf(specs.paths[name], spec) for name, spec in specs.leaves.items()}
        _check(specs, self._leaves)
        root = absolute_path(self.path)
        path = root if self.as_step is None else f"{root}/{self.as_step}"
        if self.as_step is not None and is_item(folder_at(root)):
            raise CheckpointError("the destination is a checkpoint itself, not a run with steps", where=root)
        self._specs, self._started = specs, time.time_ns()
        self._stage(path, needed_bytes(specs))
        with writing(path):
            if self.processes.count > 1:
                os.mkdir(f"{self._item}/{self._part}")
            store = f"{self._item}/{self._part}".rstrip("/")
            self._store = OcdbtWriter(store, file_bytes=self._open_staging.file_bytes)
            for leaf in self._leaves.values():
                if leaf.array is not None and self.processes.is_first:
                    file, document = zarr_document(leaf.array)
                    self._store.put(_key(leaf.name, file), document)

    def _stage(self, path: str, needed: int) -> None:
        """Make the temporary folder, or join the first process in its own."""
        if self.processes.is_first:
            self._staging = Staging.begin(path, needed_bytes=needed, overwrite=self.overwrite)
        else:
            self._staging = Staging.join(*self.processes.wait("staged", [0])[0])
        with writing(path):
            if not os.path.isdir(self._item):  # that of a step
                os.mkdir(self._item)
        if self.processes.is_first:
            self.processes.tell("staged", [self._staging.path, self._staging.temporary])

    @property
    def _part(self) -> str:
        """The folder in the item of this process's own store."""
        return f"{PART_PREFIX}{self.processes.index}" if self.processes.count > 1 else ""

    def _leaf(self, path: tuple[str | int, ...], spec: LeafSpec) -> _Leaf:
        leaf = _Leaf(stored_name(path), spec)
        if spec.dtype is not None and spec.kind not in ("string", "empty"):
            leaf.array = layout(spec, self.settings)
            leaf.missing = math.prod(leaf.array.grid)
        return leaf

    @property
    def _item(self) -> str:
        return self._open_staging.temporary + ("" if self.as_step is None else f"/{DEFAULT_ITEM}")

    @property
    def _open_staging(self) -> Staging:
        if self._staging is None:
            raise ValueError("begin() comes first")
        return self._staging

    @property
    def _open_store(self) -> OcdbtWriter:
        if self._store is None:
            raise ValueError("begin() comes first")
        return self._store

    def parts(self, name: str) -> Iterator[Spans]:
        """The parts of an array leaf: chunk by chunk, and big chunks by runs of rows."""
        array = self._leaves[name].array
        if array is None or self._leaves[name].spec.kind == "scalar":
            return
        for position in np.ndindex(*array.grid):
            yield from value_parts(array, position, self.part_bytes)

    def stored_values(self, name: str) -> dict[str, int]:
        """The stored values of an array leaf in the order of `parts`: the bytes that each holds decoded, by its key."""
        array = self._leaves[name].array
        if array is None:
            return {}
        boxes = {key: region(array.value_shape, at, array.shape) for key, at in self._leaves[name].positions.items()}
        return {key: math.prod(b - a for a, b in box) * array.dtype.itemsize for key, box in boxes.items()}

    def parts_of(self, name: str, key: str) -> Iterator[Spans]:
        """Those of the `parts` that make one stored value."""
        leaf = self._leaves[name]
        return iter(()) if leaf.array is None else value_parts(leaf.array, leaf.positions[key], self.part_bytes)

    def assign(self, keys: Mapping[str, Collection[str]]) -> None:
        """Which stored values come from this process; all others from another one."""
        for name, leaf in self._leaves.items():
            if leaf.spec.kind != "scalar" or not self.processes.is_first:
                leaf.missing = len(keys.get(name, ()))

    def write(self, name: str, spans: Spans, data: np.ndarray) -> None:
        """Encode one part to the disk."""
        leaf = self._leaves[name]
        array = leaf.array
        if array is None or data.shape != tuple([b - a for a, b in spans]) or data.dtype != array.dtype:
            raise ValueError(f"{name}: {data.dtype}{list(data.shape)} is not a part {spans} of {leaf.spec}")
        position = tuple([start // size for (start, _), size in zip(spans, array.value_shape, strict=True)])
        with writing(self._open_staging.path):
            stream = leaf.streams.get(position) or self._start(leaf, array, position)
            if stream.write(spans, data):
                self._arrived(leaf, position)

    def _start(self, leaf: _Leaf, array: ZarrArray, position: tuple[int, ...]) -> ValueStream:
        writer = self._open_store.start(_key(leaf.name, array.key(position)))
        stream = ValueStream(array, position, writer, self.part_bytes)
        with self._lock:
            leaf.streams[position] = stream
        return stream

    def _arrived(self, leaf: _Leaf, position: tuple[int, ...] | None) -> None:
        with self._lock:
            leaf.missing -= 1
            if position is not None:
                del leaf.streams[position]

    def accepts_encoded(self, name: str, array: ZarrArray) -> bool:
        """Whether stored values are the same bytes here."""
        return array.codec is not None and array == self._leaves[name].array

    def write_encoded(self, name: str, key: str, value: Encoded) -> None:
        """Copy a stored value."""
        leaf = self._leaves[name]
        if value.length == 0:
            raise CheckpointError("a leaf cannot be copied", leaves=[(name, f"its stored value {key} is empty")])
        with writing(self._open_staging.path):
            self._open_store.copy(_key(leaf.name, key), value)
        self._arrived(leaf, None)

    def value(self, name: str, value: Value | None) -> None:
        """A scalar becomes an array without axes, a string goes to the file of strings."""
        leaf = self._leaves[name]
        if leaf.spec.kind == "string":
            self._strings[leaf.name] = text_of(name, value)
        elif leaf.array is not None:
            self.write(name, (), np.asarray(value, leaf.array.dtype))

    def close(self) -> PurePath:
        """Finish the store; then one process writes the files around it, brings all to disk, and renames."""
        staging = self._open_staging
        self._check_whole()
        with self.processes.busy(), writing(staging.path):
            self._open_store.close()
            if self.processes.count > 1:
                staging.publish(self.processes.further)
        self.processes.tell("written")
        if self.processes.is_first:
            self.processes.wait("written")
            with self.processes.busy(), writing(staging.path):
                self._write_documents()
                done = staging.commit(self._merge)
        else:
            done = staging.committed()
        self.processes.finish()
        return done

    def _merge(self) -> None:
        """One store of the processes' own, if all that they wrote is seen from here."""
        if self.processes.count == 1:
            return
        arrays = [leaf.array for leaf in self._leaves.values() if leaf.array is not None]
        wanted = sum(1 + math.prod(array.grid) for array in arrays)
        item = "" if self.as_step is None else DEFAULT_ITEM
        parts = [f"{PART_PREFIX}{i}" for i in range(self.processes.count)]
        found = merge(lambda part: self._open_staging.store_spec(f"{item}/{part}".strip("/")), parts, self._item)
        if found != wanted:
            problem = f"the processes' stores have {found:,} of {wanted:,} values, as far as is seen from here"
            raise CheckpointError(problem, where=self._item)

    def _write_documents(self) -> None:
        """The files around the store."""
        staging = self._open_staging
        jax = [leaf for leaf in self._leaves.values() if is_jax(leaf.spec)]
        is_zarr3 = self.settings.driver == "zarr3"
        documents = {
            METADATA: tree_document(self._specs, zarr3=is_zarr3, custom_metadata=self.settings.custom_metadata),
            SHARDING: sharding_document((leaf.spec, leaf.name) for leaf in jax),
            f"{ARRAY_METADATAS}/process_0": array_metadatas_document(
                (leaf.spec, leaf.name, leaf.array) for leaf in jax if leaf.array is not None
            ),
        }
        if self._strings:
            documents[STRINGS] = strings_document(self._strings)
        item = None if self.as_step is None else DEFAULT_ITEM
        os.mkdir(f"{self._item}/{ARRAY_METADATAS}")
        for name, document in documents.items():
            write_file(f"{self._item}/{name}", document)
        copy_beside(self.beside, staging.temporary)
        write_file(f"{staging.temporary}/_CHECKPOINT_METADATA", checkpoint_document(item, self._started))
        done = f"Checkpoint commit was successful to {staging.path}".encode()
        for folder in dict.fromkeys([self._item, staging.temporary]):
            write_file(f"{folder}/{COMMIT}", done)

    def _check_whole(self) -> None:
        missing = [
            (name, f"{leaf.missing} of its stored values were not written")
            for name, leaf in self._leaves.items()
            if leaf.missing or (self.processes.is_first and self._lacks_text(leaf))
        ]
        if missing:
            raise CheckpointError("the checkpoint is not whole", leaves=missing, where=self._open_staging.path)

    def _lacks_text(self, leaf: _Leaf) -> bool:
        return leaf.spec.kind == "string" and leaf.name not in self._strings

    def abort(self) -> None:
        """Remove what was written."""
        if self._store is not None:
            self._store.discard()
        if self._staging is not None:
            self._staging.discard()


def _key(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def layout(spec: LeafSpec, settings: OrbaxSettings) -> ZarrArray:
    """How an array leaf is stored: in the chunks and shards of its spec where they fit it, else as one chunk."""
    shape, dtype = spec.data_shape, spec.dtype
    if dtype is None:
        raise ValueError("a leaf without a dtype has no layout")
    chunks = _fitting(spec.chunk_shape, shape, dtype) or default_chunks(shape, dtype.itemsize)
    if spec.kind == "key":
        chunks = (*chunks[: len(spec.shape)], *shape[len(spec.shape) :])
    shards = _fitting(spec.shard_shape, shape, dtype) if settings.driver == "zarr3" else None
    if shards is not None and any(shard % chunk for shard, chunk in zip(shards, chunks, strict=True)):
        shards = None
    separator, prefix = ("/", "c") if settings.driver == "zarr3" else (".", "")
    return ZarrArray(settings.driver, shape, dtype, chunks, shards, separator, prefix, settings.codec)


def _fitting(sizes: tuple[int, ...] | None, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...] | None:
    """A wished grid that has the array's axes and would not store much more than the array."""
    if sizes is None or len(sizes) != len(shape) or not all(sizes):
        return None
    stored = math.prod(-(-n // size) * size for n, size in zip(shape, sizes, strict=True)) * dtype.itemsize
    return sizes if stored <= max(4 * math.prod(shape) * dtype.itemsize, 64 << 10) else None


def default_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The whole array; the first axes halved until a chunk is at most 1 GiB."""
    chunks = [max(size, 1) for size in shape]
    for axis in range(len(chunks)):
        while chunks[axis] > 1 and math.prod(chunks) * itemsize > _CHUNK_BYTES:
            chunks[axis] = -(-chunks[axis] // 2)
    return tuple(chunks)


def needed_bytes(specs: Specs) -> int:
    """An estimate from above: the stored bytes of leaves that pass through, the decoded ones of others."""
    leaves = specs.leaves.values()
    return _OVERHEAD_BYTES + sum(
        _OVERHEAD_PER_LEAF + (spec.nbytes if spec.stored_bytes is None else spec.stored_bytes) for spec in leaves
    )


def _check(specs: Specs, leaves: Mapping[str, _Leaf]) -> None:
    foreign = [(name, problem) for name, leaf in leaves.items() if (problem := _problem(leaf)) is not None]
    if foreign:
        raise CheckpointError("Orbax cannot store these leaves", leaves=foreign)
    check_names(((name, leaf.name) for name, leaf in leaves.items() if leaf.spec.kind != "empty"), "Orbax")
    check_names(((name, tree_key(specs.paths[name])) for name in leaves), "Orbax")


def _problem(leaf: _Leaf) -> str | None:
    spec = leaf.spec
    try:
        check_name(leaf.name, "")
    except CheckpointError as error:
        return str(error).splitlines()[0]
    if spec.kind in ("string", "empty"):
        return "is an array of strings" if spec.shape else None
    if spec.dtype is None:
        return "its dtype is not known"
    return f"{spec.dtype.name} is no dtype of TensorStore" if spec.dtype.name in _FOREIGN_DTYPES else None


def check_names(pairs: Iterable[tuple[str, str]], what: str) -> None:
    """Refuse leaves that would be stored under one name, which joins the keys of a path with dots."""
    seen: dict[str, list[str]] = {}
    for name, stored in pairs:
        seen.setdefault(stored, []).append(name)
    twice = [(name, f"stored as {stored!r}") for stored, names in seen.items() if len(names) > 1 for name in names]
    if twice:
        raise CheckpointError(
            f"{what} would store several leaves under one name",
            leaves=twice,
            hint="its keys are joined by dots: rename one of them first, with ok.rename",
        )
