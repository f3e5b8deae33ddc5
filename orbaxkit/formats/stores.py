"""Where the arrays of one item lie: in an OCDBT store, or as one folder per array."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import LFS_HEAD, LFS_HINT, LFS_PROBLEM, Folder, check_name
from orbaxkit.formats.ocdbt import UNKNOWN, Index, Value, extent_problem, is_ocdbt, read_index, read_values
from orbaxkit.formats.zarr import METADATA_NAMES
from orbaxkit.paths import KeyPath, format_path

MAX_ZARR_BYTES = 1 << 20
_WALK_DEPTH = 12


@runtime_checkable
class ArrayStore(Protocol):
    """The arrays of one item by their stored names."""

    @property
    def folder(self) -> Folder:
        """The folder that the files of stored values are relative to."""

    def names(self) -> list[str]:
        """The names of all arrays."""

    def metadata(self, names: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
        """`(array, metadata file, its bytes)` for those of the names that there are."""

    def stored_bytes(self, name: str) -> int | None:
        """The bytes of an array's stored values; None where the store does not tell."""

    def values(self, name: str) -> dict[str, Value]:
        """Where each stored value of an array lies, by its key."""

    def open(self, value: Value) -> AbstractContextManager[Any]:
        """What a value lies in: an open file, or its own bytes."""

    def damage(self, name: str) -> str | None:
        """Why the stored values of an array cannot all be read, or None; found without reading them."""

    def kvstore(self, name: str) -> dict[str, Any]:
        """TensorStore's spec of the array's own key-value store."""

    def where(self, name: str) -> str:
        """The place to name in errors."""


def open_store(folder: Folder, names: dict[str, bool]) -> ArrayStore:
    """The store of an item's folder, which holds `names`."""
    return OcdbtStore(read_index(folder)) if is_ocdbt(names) else PlainStore(folder)


def announce(folder: Folder, values: Iterable[Value]) -> None:
    """Tell a store's folder which values will be opened."""
    folder.expect((v.file, v.offset, v.length) for v in values if v.inline is None and v.length != UNKNOWN)


@dataclass(frozen=True)
class PlainStore:
    """One folder per array: `<name>/.zarray` and a file per stored value."""

    folder: Folder

    def names(self) -> list[str]:
        """Walk the folder; a key with `/` lies deeper."""
        return list(self._walk("", _WALK_DEPTH))

    def _walk(self, inside: str, depth: int) -> Iterator[str]:
        found = self.folder.folder(inside).names()
        if inside and any(name in found for name in METADATA_NAMES):
            yield inside
        for name, is_folder in found.items():
            if is_folder and depth and not (inside == "" and name == "array_metadatas"):
                yield from self._walk(f"{inside}/{name}" if inside else name, depth - 1)

    def metadata(self, names: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
        """Open each array's metadata file."""
        for name in names:
            for file in METADATA_NAMES:
                data = self.folder.read_optional(f"{name}/{file}", MAX_ZARR_BYTES) if name else None
                if data is not None:
                    yield name, file, data
                    break

    def stored_bytes(self, name: str) -> int | None:
        """From a listing."""
        lengths = [value.length for value in self.values(name).values()]
        return None if UNKNOWN in lengths else sum(lengths)

    def values(self, name: str) -> dict[str, Value]:
        """List the array's folder: each file is one value."""
        sizes = self.folder.sizes_below(name)
        return {
            key: Value(UNKNOWN if size is None else size, None, f"{name}/{key}", 0, "")
            for key, size in sizes.items()
            if key not in METADATA_NAMES
        }

    def open(self, value: Value) -> AbstractContextManager[Any]:
        """The value's file."""
        return self.folder.open(value.file, (0, value.length) if value.length != UNKNOWN else None)

    def damage(self, name: str) -> str | None:
        """An empty file, or a Git LFS pointer."""
        for value in self.values(name).values():
            if value.length == 0:
                return f"{value.file} is empty"
            if 0 < value.length < 256 and self._starts_with(value.file, LFS_HEAD):
                return f"{value.file} {LFS_PROBLEM} ({LFS_HINT})"
        return None

    def _starts_with(self, file: str, head: bytes) -> bool:
        with self.folder.open(file) as opened:
            return opened.read(len(head)) == head

    def kvstore(self, name: str) -> dict[str, Any]:
        """The array's folder."""
        return self.folder.folder(name).kvstore

    def where(self, name: str) -> str:
        """The array's folder."""
        return self.folder.where(name)


@dataclass(frozen=True)
class OcdbtStore:
    """Arrays in an OCDBT store: keys `<name>/.zarray` and `<name>/<key of a stored value>`."""

    index: Index
    _sizes: dict[str, int] = field(default_factory=dict)  # of data files, as they are asked for

    @property
    def folder(self) -> Folder:
        """The store's folder."""
        return self.index.folder

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of an unmerged store."""
        return self.index.parts

    def names(self) -> list[str]:
        """The arrays in the index."""
        return list(self.index.arrays)

    def metadata(self, names: Iterable[str]) -> Iterator[tuple[str, str, bytes]]:
        """Metadata mostly lies in the index itself."""
        found = [(name, *self.index.arrays[name]) for name in names if name in self.index.arrays]
        data = read_values(self.folder, [value for _, _, value in found])
        return ((name, file, text) for (name, file, _), text in zip(found, data, strict=True))

    def stored_bytes(self, name: str) -> int | None:
        """From the index."""
        return self.index.nbytes(name)

    def values(self, name: str) -> dict[str, Value]:
        """From the index."""
        return self.index.values(name)

    def open(self, value: Value) -> AbstractContextManager[Any]:
        """The value's data file, or its bytes where the index holds them."""
        if value.inline is not None:
            return nullcontext(value.inline)
        return self.folder.open(value.file, (value.offset, value.length))

    def damage(self, name: str) -> str | None:
        """A data file that is missing or too short. TensorStore reads such values as empty, without an error."""
        for value in self.values(name).values():
            if value.inline is None and (problem := self._problem(value)):
                return f"its data file {value.file} {problem}"
        return None

    def _problem(self, value: Value) -> str | None:
        end = value.offset + value.length
        if value.file not in self._sizes:
            self._sizes[value.file] = self.folder.file_size(value.file) or 0
        return None if end <= self._sizes[value.file] else extent_problem(self.folder, value.file, end)

    def kvstore(self, name: str) -> dict[str, Any]:
        """The array's keys: of one store, or where several have some, each key from the store that has it."""
        path = f"{name}/" if name else ""
        own = [self.index.arrays[name], *self.values(name).items()]
        if not any(value.part for _, value in own):
            return _ocdbt(self.folder, path)
        layers = [{"base": self._store_of(value, path + key), "exact": key} for key, value in own]
        return {"driver": "kvstack", "layers": layers}

    def _store_of(self, value: Value, key: str) -> dict[str, Any]:
        return _ocdbt(self.folder.folder(value.part), key.removeprefix(f"{value.part}/"))

    def where(self, name: str) -> str:
        """The store's folder."""
        return self.folder.path


def _ocdbt(folder: Folder, path: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": folder.kvstore, "path": path, "cache_pool": "cache_pool#nodes"}


def check_stored_name(name: str, path: KeyPath, where: str) -> str:
    """Refuse a leaf whose stored name leads out of the checkpoint."""
    try:
        return check_name(name, where)
    except CheckpointError:
        raise CheckpointError(
            "a stored name leads out of the checkpoint",
            leaves=[(format_path(path), f"stored as {name!r}")],
            where=where,
        ) from None
