"""A destination that is whole or not there: written beside its place, brought to disk, renamed last.

What an interrupted run leaves is `NAME.orbaxkit-tmp-xxxxxxxx` (unfinished) or `NAME.orbaxkit-old-xxxxxxxx` (what stood
at the destination before); both are named by the next run and by whatever looks at the folder.
"""

import errno
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, ClassVar

from orbaxkit.errors import CheckpointError, CheckpointWarning, shorten
from orbaxkit.formats.classify import enclosing_item, leftover_name
from orbaxkit.formats.files import Folder, check_name, folder_at
from orbaxkit.formats.remote import is_remote

_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # no digits: a name that ends in a number could be taken for a step
_LOOKS = 20  # for a folder that another host made a moment ago, within a second


@dataclass
class Staging:
    """A file or folder on its way to `path`. Write to `temporary`, then `commit`, or `discard`."""

    file_bytes: ClassVar[int] = (
        2 << 30
    )  # at which a file that may be cut is cut: copies of a checkpoint run in parallel
    path: str
    temporary: str
    overwrite: bool = False
    _made: list[str] = field(default_factory=list)  # parents that were not there
    _aside: str | None = None

    @staticmethod
    def begin(path: str, *, needed_bytes: int, overwrite: bool = False, is_folder: bool = True) -> "Staging":
        """Check the destination and make the temporary folder beside it (not the file, where it is one).

        Raises CheckpointError: something stands there and `overwrite` is not given, the disk has too little room, or
        the place lies inside a checkpoint.
        """
        if is_remote(path):
            from orbaxkit.formats.uploading import Upload

            return Upload.start(path, needed_bytes, overwrite, is_folder)
        path = path.rstrip("/") or "/"
        _check_free(path, overwrite)
        parent = os.path.dirname(path)
        check_room(parent, needed_bytes)
        _name_leftovers(path)
        staging = Staging(path, f"{path}.orbaxkit-tmp-{_token()}", overwrite)
        with writing(path):
            staging._make_parents(parent)
            if is_folder:
                os.mkdir(staging.temporary)
        return staging

    @staticmethod
    def join(path: str, temporary: str) -> "Staging":
        """Take part in one that another process began. Raises CheckpointError: its folder is not seen from here."""
        if is_remote(path):
            from orbaxkit.formats.uploading import Upload

            return Upload.make(path)
        for _ in range(_LOOKS):
            if os.path.isdir(temporary):
                return Staging(path, temporary)
            time.sleep(1 / _LOOKS)
        raise CheckpointError(
            "the folder that another process made is not seen from here",
            where=temporary,
            hint="several processes write to a file system that all of them share",
        )

    def _make_parents(self, parent: str) -> None:
        missing = []
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            os.mkdir(folder)
            self._made.append(folder)

    def publish(self, further: Callable[[], None]) -> None:
        """Let other processes see what is written, which here they do; `further()` runs after each file."""

    def store_spec(self, inside: str) -> dict[str, Any]:
        """A folder in what was published, as TensorStore names it."""
        return Folder(f"{self.temporary}/{inside}".rstrip("/")).kvstore

    def commit(self, finish: Callable[[], None] = lambda: None) -> PurePath:
        """Bring all folders to disk and put the checkpoint in its place; then what stood there goes.

        `finish` is what is still to be done before anyone may take it for a checkpoint.
        """
        finish()
        with writing(self.path):
            if os.path.isdir(self.temporary):
                sync_folders(self.temporary)
            _check_free(self.path, self.overwrite)
            try:
                if os.path.lexists(self.path):
                    aside = f"{self.path}.orbaxkit-old-{_token()}"
                    os.rename(self.path, aside)
                    self._aside = aside
                os.rename(self.temporary, self.path)
            except BaseException:
                self._put_back()
                raise
            for folder in (os.path.dirname(self.path), *(os.path.dirname(made) for made in reversed(self._made))):
                sync_folder(folder)
        self._made.clear()
        if self._aside is not None:
            _remove(self._aside)
        return Path(self.path)

    def committed(self) -> PurePath:
        """Where another process puts it."""
        return Path(self.path)

    def _put_back(self) -> None:
        if self._aside is not None and not os.path.lexists(self.path):
            os.rename(self._aside, self.path)
            self._aside = None

    def discard(self) -> None:
        """Remove what was written, and folders that were made for it."""
        with suppress(OSError):
            self._put_back()
        if os.path.lexists(self.temporary):
            aside = f"{self.path}.orbaxkit-tmp-{_token()}"
            with suppress(OSError):  # else another process could put in place what is half removed; or it was faster
                os.rename(self.temporary, aside)
                _remove(aside)
        for folder in reversed(self._made):
            with suppress(OSError):  # something else may lie there by now
                os.rmdir(folder)
        self._made.clear()


def leftovers(path: str) -> list[str]:
    """What interrupted runs left beside a destination, or what is being written there now."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        return sorted(f"{folder}/{found}" for found in os.listdir(folder) if leftover_name(found) == name)
    except OSError:
        return []


def _name_leftovers(path: str) -> None:
    found = leftovers(path)
    if not found:
        return
    old = [name for name in found if ".orbaxkit-old-" in name]
    hint = f"; {old[0]} is what stood at the destination before: rename it back if you need it" if old else ""
    warnings.warn(
        f"an interrupted run left {', '.join(shorten(found))} (remove it, unless it is being written now){hint}",
        CheckpointWarning,
        stacklevel=4,
    )


def _token() -> str:
    return "".join(random.SystemRandom().choices(_LETTERS, k=8))


def _check_free(path: str, overwrite: bool) -> None:
    """Refuse a destination that stands; an empty folder is as good as none."""
    outer = enclosing_item(Folder(path))
    if outer is not None:
        raise CheckpointError("the destination lies inside a checkpoint", where=path, hint=f"not in {outer.path}")
    if not os.path.lexists(path) or overwrite:
        return
    if os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path):
        return
    raise CheckpointError(
        "the destination exists",
        where=path,
        hint="choose another, or overwrite it: overwrite=True, --overwrite",
    )


def check_room(folder: str, needed: int) -> None:
    """Refuse what the disk of a folder, there or not yet, has no room for."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"{needed:,} bytes are to be written, {free:,} bytes of disk are free", where=folder)


def _remove(path: str) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error.strerror}", CheckpointWarning, stacklevel=3)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """What the system refuses inside becomes one clear error about the destination."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError("the disk is full", where=path, hint="what was written is removed") from None
        reason = error.strerror or str(error)
        raise CheckpointError(f"it cannot be written: {reason}", where=path) from None


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write to an unbuffered file; the system may take less than all at once."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[file.write(view) :]


def write_file(path: str, data: bytes) -> None:
    """A small file, whole and on disk."""
    with open(path, "xb") as file:
        file.write(data)
        sync(file)


def copy_beside(beside: Mapping[str, str], folder: str) -> None:
    """Files and folders as they are, under their names; links as what they lead to."""
    for name, path in beside.items():
        target = f"{folder}/{check_name(name, folder)}"
        if os.path.lexists(target):
            raise CheckpointError(f"{name} lies beside the tree, and is a name of the format", where=path)
        folder_at(path).copy_to(target)
        for file in _files_below(target):
            with open(file, "rb") as copied:
                os.fsync(copied.fileno())


def _files_below(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (f"{folder}/{name}" for name in names)


def sync(file: IO[bytes]) -> None:
    """Bring a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Bring the names in a folder to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folders(path: str) -> None:
    """The names in a folder and in all below it."""
    for folder, _, _ in os.walk(path, topdown=False):
        sync_folder(folder)
