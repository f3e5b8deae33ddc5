"""A folder of files: listing, bounded reads, checked names. `remote` has the same for object stores."""

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from orbaxkit.errors import CheckpointError

# No metadata file of a real checkpoint comes near this; a file that does is not metadata.
MAX_METADATA_BYTES = 1 << 30

# Where in a file something lies: offset and length.
Extent = tuple[int, int]

LFS_HEAD = b"version https://git-lfs"
LFS_PROBLEM = "is a Git LFS pointer, not the data"
LFS_HINT = "fetch the real files: git lfs pull"


def check_name(name: str, where: object) -> str:
    """Refuse a name out of a file that could lead out of the checkpoint's folder; symlinks on disk are followed."""
    if "\0" in name or name.startswith("/") or ("/." in f"/{name}" and not {"..", "."}.isdisjoint(name.split("/"))):
        raise CheckpointError(f"the name {name!r} leads out of the checkpoint", where=where)
    return name


def file_error(path: str, problem: str, hint: str | None = None) -> CheckpointError:
    """The one shape of an error about one file."""
    return CheckpointError(f"{os.path.basename(path.rstrip('/')) or path} {problem}", where=path, hint=hint)


@contextmanager
def _os_errors(path: str, what: str = "read") -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise file_error(path, "is missing") from None
    except IsADirectoryError:
        raise file_error(path, "is a directory where a file was expected") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise file_error(path, f"cannot be {what}: {reason}") from None


@dataclass(frozen=True, slots=True)
class Folder:
    """A local folder. Names are relative to it, `/` between their parts, and never lead out of it."""

    path: str

    def where(self, name: str) -> str:
        """The full path of a name."""
        check_name(name, self.path)
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def folder(self, name: str) -> "Folder":
        """A folder inside this one."""
        return replace(self, path=self.where(name))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path.rstrip("/"))

    @property
    def parent(self) -> "Folder":
        """The folder that holds this one."""
        return Folder(os.path.dirname(self.path.rstrip("/")) or "/")

    @property
    def is_local(self) -> bool:
        """Whether its files can be opened by the system."""
        return True

    @property
    def kvstore(self) -> dict[str, Any]:
        """This folder as TensorStore names it."""
        return {"driver": "file", "path": self.path.rstrip("/") + "/"}

    @property
    def context(self) -> dict[str, Any]:
        """What TensorStore is to keep to here."""
        return {}

    def kind(self) -> Literal["folder", "file"] | None:
        """What stands at the path; None where nothing does."""
        if os.path.isdir(self.path):
            return "folder"
        return "file" if os.path.lexists(self.path) else None

    def names(self) -> dict[str, bool]:
        """What the folder holds, sorted: name -> whether it is a folder."""
        with _os_errors(self.path), os.scandir(self.path) as entries:
            found = [(entry.name, _is_folder(entry)) for entry in entries]
        return dict(sorted(found))

    def has_folder(self, name: str) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(self.where(name))

    def has_file(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.file_size(name) is not None

    def file_size(self, name: str) -> int | None:
        """The size of a file; None where there is none, or where the store does not tell."""
        try:
            found = os.stat(self.where(name))
        except (OSError, ValueError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def sizes_below(self, name: str, depth: int = 40) -> dict[str, int | None]:
        """The size of every file below a folder, by its path from there; None where the store does not tell."""
        out: dict[str, int | None] = {}
        with _os_errors(self.where(name)), os.scandir(self.where(name)) as entries:
            for entry in entries:
                if _is_folder(entry) and depth:
                    below = self.folder(name).sizes_below(entry.name, depth - 1)
                    out.update((f"{entry.name}/{key}", size) for key, size in below.items())
                elif (size := self.file_size(f"{name}/{entry.name}" if name else entry.name)) is not None:
                    out[entry.name] = size
        return out

    def read(self, name: str, limit: int = MAX_METADATA_BYTES) -> bytes:
        """A whole small file; empty files and Git LFS pointers are refused."""
        data = self.read_optional(name, limit)
        if data is None:
            raise file_error(self.where(name), "is missing")
        return data

    def read_optional(self, name: str, limit: int = MAX_METADATA_BYTES) -> bytes | None:
        """The same, or None where there is no such file."""
        path = self.where(name)
        try:
            with _os_errors(path), open_regular(path) as file:
                data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # no buffer larger than the file
        except CheckpointError:
            if os.path.lexists(path):
                raise
            return None
        if len(data) > limit:
            raise file_error(path, f"holds more than {limit:,} bytes")
        if not data:
            raise file_error(path, "is empty", hint="the save or the download was cut short")
        check_not_lfs(data, path)
        return data

    @contextmanager
    def open(self, name: str, extent: Extent | None = None) -> Iterator[Any]:
        """A file opened for reading; what goes wrong inside the block is an error about this file.

        `extent` is what of it will be read, where that is known: object stores are asked for no more.
        """
        path = self.where(name)
        with _os_errors(path), open_regular(path) as file:
            yield file

    def copy_to(self, target: str) -> None:
        """What stands at the path, a file or a folder of files, as a new local one."""
        shutil.copytree(self.path, target) if os.path.isdir(self.path) else shutil.copyfile(self.path, target)

    def write(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all, over an old one."""
        path = self.where(name)
        with _os_errors(path, "written"):
            with open(f"{path}.orbaxkit-tmp", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.orbaxkit-tmp", path)

    def expect(self, extents: Iterable[tuple[str, int, int]]) -> None:
        """Announce `(file, offset, length)` of what will be opened: object stores are asked for neighbours together."""

    def read_json(self, name: str) -> Any:
        """A JSON file."""
        return parse_json(self.read(name), self.where(name))

    def read_json_optional(self, name: str) -> Any:
        """A JSON file, or None where there is no such file."""
        data = self.read_optional(name)
        return None if data is None else parse_json(data, self.where(name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads around in a circle
        return False


def folder_at(path: str) -> Folder:
    """The folder of an absolute path, or of a URL."""
    from orbaxkit.formats.remote import RemoteFolder, is_remote

    return RemoteFolder.at(path) if is_remote(path) else Folder(path)


def pread(file: Any, size: int, offset: int) -> bytes:
    """At most so many bytes of an open file, or of bytes in memory."""
    if isinstance(file, bytes):
        return file[offset : offset + size]
    return file.pread(size, offset) if hasattr(file, "pread") else os.pread(file.fileno(), size, offset)


def pread_into(file: Any, view: memoryview, offset: int) -> int:
    """Fill a part of `view` from an open file; how many bytes that are."""
    if hasattr(file, "fileno"):
        return os.preadv(file.fileno(), [view], offset)
    data = pread(file, len(view), offset)
    view[: len(data)] = data
    return len(data)


def open_regular(path: str) -> Any:
    """Open without waiting for a writer: a FIFO in a checkpoint must not hang the reader."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    raise IsADirectoryError(path) if stat.S_ISDIR(mode) else ValueError("it is no regular file")


def check_not_lfs(head: bytes, path: str) -> None:
    """Refuse the pointer that Git LFS leaves in place of a file."""
    if head.startswith(LFS_HEAD):
        raise file_error(path, LFS_PROBLEM, hint=LFS_HINT)


def parse_json(data: bytes, where: str) -> Any:
    """JSON whose objects name no key twice; anything else is an error about the file."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise file_error(where, "is nested too deeply") from None
    except ValueError as error:
        raise file_error(where, f"is not valid JSON: {error}", hint="it may be cut short") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} comes twice")
    return out


def checked_sizes(value: Any, where: object, what: str) -> tuple[int, ...]:
    """A list of sizes out of a file: at most 32 integers from 0 to 2**63 - 1."""
    good = isinstance(value, list | tuple) and len(value) <= 32
    if good and all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return tuple(value)
    raise CheckpointError(f"{what} is not a list of sizes: {str(value)[:80]}", where=where)


def natural(names: Iterable[str]) -> list[str]:
    """Names in an order in which process_2 comes before process_10."""
    return sorted(names, key=lambda name: (len(name), name))
