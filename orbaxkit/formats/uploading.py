"""A destination in an object store: written to a local folder, then uploaded; what makes it a checkpoint comes last.

Stores have no rename. Data goes first, then the files by which readers know a checkpoint, then `commit_success.txt`, as
Orbax does it on `gs://`: an upload that was interrupted is no checkpoint, or one that says that it is not finished.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any

from etils import epath

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.classify import COMMIT
from orbaxkit.formats.ocdbt import MANIFEST
from orbaxkit.formats.remote import Bucket, RemoteFolder
from orbaxkit.formats.safetensors import INDEX_SUFFIX
from orbaxkit.formats.staging import Staging, check_room
from orbaxkit.formats.structure import METADATA

_IN_FLIGHT_BYTES = 256 << 20
_LAST = (MANIFEST, INDEX_SUFFIX, METADATA, COMMIT)  # of names' ends; the others before


@dataclass
class Upload(Staging):
    """A file or folder on its way to a URL, by way of the system's place for temporary files (`TMPDIR`)."""

    _done: list[str] = field(default_factory=list)

    @staticmethod
    def start(path: str, needed_bytes: int, overwrite: bool, is_folder: bool) -> "Upload":
        """Check the destination, and make the local folder.

        Raises CheckpointError: something stands there, which nothing could replace in one step, or the local disk has
        too little room.
        """
        target = RemoteFolder.at(path)
        _check_free(target, overwrite)
        check_room(tempfile.gettempdir(), needed_bytes)
        upload = Upload(path, f"{tempfile.mkdtemp(prefix='orbaxkit-')}/{target.name}")
        if is_folder:
            os.mkdir(upload.temporary)
        return upload

    def commit(self) -> PurePath:
        """Upload everything. What fails on the way is taken back."""
        _check_free(RemoteFolder.at(self.path), overwrite=False)
        try:
            for batch in self._batches():
                self._upload(batch)
        except BaseException:
            self._take_back()
            raise
        finally:
            self._remove_local()
        return epath.Path(self.path)

    @cached_property
    def _bucket(self) -> Bucket:
        return RemoteFolder.at(self.path).bucket

    def _key(self, name: str) -> str:
        inside = self.path[len(self._bucket.url) + 1 :]
        return f"{inside}/{name}" if name else inside

    def _batches(self) -> list[list[str]]:
        """The files by when they go: those that end in one name of `_LAST` after those before it."""
        files = list(_files_below(self.temporary)) if os.path.isdir(self.temporary) else [""]
        order = {name: _turn(name) for name in files}
        return [[name for name in files if order[name] == turn] for turn in sorted(set(order.values()))]

    def _upload(self, names: list[str]) -> None:
        """Several at a time; each file is in memory while it is sent."""
        pending: deque[tuple[str, int, Any]] = deque()
        held = 0
        for name in names:
            data = _read(f"{self.temporary}/{name}" if name else self.temporary)
            while pending and held + len(data) > _IN_FLIGHT_BYTES:
                held -= self._finish(*pending.popleft())
            pending.append((name, len(data), self._bucket.start_writing(self._key(name), data)))
            held += len(data)
        while pending:
            self._finish(*pending.popleft())

    def _finish(self, name: str, size: int, pending: Any) -> int:
        self._bucket.finish_writing(self._key(name), pending, size)
        self._done.append(name)
        return size

    def _take_back(self) -> None:
        for name in reversed(self._done):
            try:
                self._bucket.delete(self._key(name))
            except CheckpointError:  # what the store refuses now stays: without the files that come last, no checkpoint
                return

    def discard(self) -> None:
        """Remove the local folder."""
        self._remove_local()

    def _remove_local(self) -> None:
        shutil.rmtree(os.path.dirname(self.temporary), ignore_errors=True)


def _check_free(target: RemoteFolder, overwrite: bool) -> None:
    if overwrite:
        raise CheckpointError(
            "object stores have no rename, so nothing there can be replaced in one step",
            where=target.path,
            hint="write to another path, or delete what is there first",
        )
    if target.kind() is not None:
        raise CheckpointError("the destination exists", where=target.path, hint="choose another, or delete it first")


def _turn(name: str) -> int:
    return next((at for at, end in enumerate(_LAST, 1) if name.endswith(end)), 0)


def _files_below(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        yield from sorted(os.path.relpath(f"{folder}/{name}", path) for name in names)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
