"""A destination in an object store: written to a local folder, then uploaded; what makes it a checkpoint comes last.

Stores have no rename. Data goes first, then the files by which readers know a checkpoint, then `commit_success.txt`, as
Orbax does it on `gs://`: an upload that was interrupted is no checkpoint, or one that says that it is not finished.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any, ClassVar

from etils import epath

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.classify import COMMIT, STEP_METADATA
from orbaxkit.formats.ocdbt import MANIFEST
from orbaxkit.formats.remote import Bucket, RemoteFolder
from orbaxkit.formats.safetensors import INDEX_SUFFIX
from orbaxkit.formats.staging import Staging, check_room
from orbaxkit.formats.structure import METADATA

_IN_FLIGHT_BYTES = 256 << 20
# All other files come first, then these turn by turn. Where processes share a checkpoint, the tree that joins their
# stores is written in the turn of the manifest.
_LAST = (INDEX_SUFFIX, METADATA, MANIFEST, STEP_METADATA, COMMIT)
_JOINED = _LAST.index(MANIFEST) + 1


@dataclass
class Upload(Staging):
    """A file or folder on its way to a URL, by way of the system's place for temporary files (`TMPDIR`)."""

    file_bytes: ClassVar[int] = 128 << 20  # in memory while it is sent
    _is_shared: bool = False  # among processes, each of which has a folder of its own
    _begun: dict[str, Any] = field(default_factory=dict)  # by name, what waits for it

    @staticmethod
    def start(path: str, needed_bytes: int, overwrite: bool, is_folder: bool) -> "Upload":
        """Check the destination, and make the local folder.

        Raises CheckpointError: something stands there, which nothing could replace in one step, or the local disk has
        too little room.
        """
        _check_free(path, overwrite)
        check_room(tempfile.gettempdir(), needed_bytes)
        return Upload.make(path, is_folder)

    @staticmethod
    def make(path: str, is_folder: bool = True) -> "Upload":
        """Make the local folder."""
        upload = Upload(path, f"{tempfile.mkdtemp(prefix='orbaxkit-')}/{RemoteFolder.at(path).name}")
        if is_folder:
            os.mkdir(upload.temporary)
        return upload

    def publish(self, further: Callable[[], None]) -> None:
        """Upload what is written so far: other processes have folders of their own."""
        self._is_shared = True
        names = list(_files_below(self.temporary))
        self._upload(names, further)
        for name in names:
            os.unlink(f"{self.temporary}/{name}")

    def store_spec(self, inside: str) -> dict[str, Any]:
        """A folder in what was published, as TensorStore names it."""
        return RemoteFolder(f"{self.path}/{inside}".rstrip("/"), self._bucket).kvstore

    def commit(self, finish: Callable[[], None] = lambda: None) -> PurePath:
        """Upload everything; `finish` comes before the files that say it is done."""
        if not self._is_shared:
            _check_free(self.path, overwrite=False)
        files = list(_files_below(self.temporary)) if os.path.isdir(self.temporary) else [""]
        for turn in range(_JOINED):
            self._upload([name for name in files if _turn(name) == turn])
        if self._is_shared:  # finish() writes these
            self._begun |= {
                name.replace(METADATA, MANIFEST): None for name in files if os.path.basename(name) == METADATA
            }
        finish()
        for turn in range(_JOINED, len(_LAST) + 1):
            self._upload([name for name in files if _turn(name) == turn])
        self._begun.clear()
        self._remove_local()
        return epath.Path(self.path)

    def committed(self) -> PurePath:
        """Where another process finishes it; its own folder is not needed any more."""
        self._remove_local()
        return epath.Path(self.path)

    @cached_property
    def _bucket(self) -> Bucket:
        return RemoteFolder.at(self.path).bucket

    def _key(self, name: str) -> str:
        inside = self.path[len(self._bucket.url) + 1 :]
        return f"{inside}/{name}" if name else inside

    def _upload(self, names: list[str], further: Callable[[], None] = lambda: None) -> None:
        """Several at a time; each file is in memory while it is sent."""
        pending: deque[tuple[str, int]] = deque()
        held = 0
        for name in names:
            data = _read(f"{self.temporary}/{name}" if name else self.temporary)
            while pending and held + len(data) > _IN_FLIGHT_BYTES:
                held -= self._finish(*pending.popleft())
            self._begun[name] = self._bucket.start_writing(self._key(name), data)
            pending.append((name, len(data)))
            held += len(data)
            further()
        while pending:
            self._finish(*pending.popleft())

    def _finish(self, name: str, size: int) -> int:
        self._bucket.finish_writing(self._key(name), self._begun[name], size)
        return size

    def _take_back(self) -> None:
        """Last comes first: what the store keeps nevertheless is no checkpoint."""
        for name, pending in reversed(self._begun.items()):
            with suppress(CheckpointError):
                if pending is not None:
                    self._bucket.finish_writing(self._key(name), pending, 0)
            with suppress(CheckpointError):
                self._bucket.delete(self._key(name))

    def discard(self) -> None:
        """Take back what was uploaded, and remove the local folder."""
        self._take_back()
        self._remove_local()

    def _remove_local(self) -> None:
        shutil.rmtree(os.path.dirname(self.temporary), ignore_errors=True)


def _check_free(path: str, overwrite: bool) -> None:
    target = RemoteFolder.at(path)
    if overwrite:
        raise CheckpointError(
            "object stores have no rename, so nothing there can be replaced in one step",
            where=target.path,
            hint="write to another path, or delete what is there first",
        )
    if target.kind() is not None:
        raise CheckpointError("the destination exists", where=target.path, hint="choose another, or delete it first")


def _turn(name: str) -> int:
    last = os.path.basename(name)
    last = INDEX_SUFFIX if last.endswith(INDEX_SUFFIX) else last
    return _LAST.index(last) + 1 if last in _LAST else 0


def _files_below(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        yield from sorted(os.path.relpath(f"{folder}/{name}", path) for name in names)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
