"""Folders in object stores, `gs://` and `s3://`, through TensorStore's drivers.

A folder is listed once, all of it, when it is first looked into; small files are read once. Values are read by ranges:
those that lie close together in one request, a large one window by window. Every request has few retries and a limit.
"""

import os
import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, Literal

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import MAX_METADATA_BYTES, Extent, Folder, check_name, check_not_lfs, file_error

SCHEMES = {"gs://": "gcs", "s3://": "s3"}

_SECONDS = 120  # that one request may take, its retries included
_SLOWEST_BYTES = 1 << 20  # a second, of what is sent
_RETRIES = {"max_retries": 4, "initial_delay": "200ms", "max_delay": "3s"}
_AT_ONCE = {"limit": 32}
CONTEXT: dict[str, Any] = {
    "gcs_request_retries": _RETRIES,
    "s3_request_retries": _RETRIES,
    "gcs_request_concurrency": _AT_ONCE,
    "s3_request_concurrency": _AT_ONCE,
}

# A server that is silent; curl, below TensorStore's drivers, knows it from here alone.
_ENVIRONMENT = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
_PAGE = 1000  # names in an answer to a listing

# A larger value is read in windows of so many bytes; smaller ones with no more than a gap between them, together.
_WINDOW_BYTES = 8 << 20
_GAP_BYTES = 256 << 10
# What is held of ranges that are read and not all used; a range that had to go is read value by value.
_HELD_BYTES = 256 << 20
_SMALLEST_RANGE = 256 << 10
_SMALL_FILE = 4 << 20

_TOTAL = re.compile(r"total size (\d+)")
_STATUS = re.compile(r"http_response_code='(\d+)'")


def is_remote(path: str) -> bool:
    """Whether a path names an object store."""
    return path.startswith(tuple(SCHEMES))


def remote_path(text: str) -> str:
    """A checked URL: a bucket, and names between single slashes that lead nowhere else."""
    scheme, _, rest = text.partition("://")
    bucket, *names = rest.rstrip("/").split("/")
    if not bucket or not {"", ".", ".."}.isdisjoint(names):
        raise CheckpointError(f"{text!r} is no path in a bucket", hint="like gs://bucket/folder or s3://bucket/folder")
    return f"{scheme}://{'/'.join((bucket, *names))}"


@dataclass(frozen=True, slots=True)
class RemoteFolder(Folder):
    """A folder in a bucket, or what could be one: stores have no folders, only names with `/`."""

    bucket: "Bucket" = field(repr=False, compare=False)

    @staticmethod
    def at(path: str) -> "RemoteFolder":
        """The folder of a URL, its bucket not yet asked anything."""
        scheme, _, rest = path.partition("://")
        return RemoteFolder(path, Bucket(f"{scheme}://{rest.split('/')[0]}"))

    @property
    def is_local(self) -> bool:
        """It is not."""
        return False

    @property
    def parent(self) -> "Folder":
        """The folder that holds this one; the bucket is its own."""
        return self if self.path == self.bucket.url else RemoteFolder(os.path.dirname(self.path), self.bucket)

    @property
    def kvstore(self) -> dict[str, Any]:
        """This folder as TensorStore names it."""
        return self.bucket.spec(f"{self._prefix}")

    @property
    def context(self) -> dict[str, Any]:
        """Few retries."""
        return CONTEXT

    @property
    def _prefix(self) -> str:
        inside = self.path[len(self.bucket.url) + 1 :]
        return f"{inside}/" if inside else ""

    def _key(self, name: str) -> str:
        return self.where(name)[len(self.bucket.url) + 1 :]

    def kind(self) -> Literal["folder", "file"] | None:
        """`folder`, `file`, or None where neither is there."""
        if self.bucket.keys_below(self._prefix):
            return "folder"
        return "file" if self.bucket.has(self._prefix.rstrip("/")) else None

    def names(self) -> dict[str, bool]:
        """What the folder holds, sorted. Of a folder above the one that was opened, only whether it is a step."""
        from orbaxkit.formats.classify import STEP_METADATA

        if not self.bucket.is_listed(self._prefix) and self.bucket.listed:
            return {STEP_METADATA: False} if self.has_file(STEP_METADATA) else {}
        keys, prefix = self.bucket.keys_below(self._prefix), self._prefix
        out: dict[str, bool] = {}
        at = 0
        while at < len(keys):
            name, slash, _ = keys[at][len(prefix) :].partition("/")
            if name:
                out[name] = bool(slash) or out.get(name, False)
            # "0" follows "/": the next name after all that lie below this one
            at = bisect_left(keys, f"{prefix}{name}0", at) if slash else at + 1
        return dict(sorted(out.items()))

    def has_folder(self, name: str) -> bool:
        """Whether there is such a folder."""
        return bool(self.bucket.keys_below(f"{self._key(name)}/"))

    def has_file(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.bucket.has(self._key(name))

    def file_size(self, name: str) -> int | None:
        """Not known: a listing does not say it, and a request for each file would be many."""
        return None

    def sizes_below(self, name: str, depth: int = 40) -> dict[str, int | None]:
        """Every file below a folder, by its path from there; sizes are not known."""
        prefix = f"{self._key(name)}/" if name else self._prefix
        return {key[len(prefix) :]: None for key in self.bucket.keys_below(prefix) if key[len(prefix) :]}

    def read_optional(self, name: str, limit: int = MAX_METADATA_BYTES) -> bytes | None:
        """A whole small file, or None where there is no such file."""
        data = self.bucket.read_small(self._key(name))
        if data is None:
            return None
        path = self.where(name)
        if len(data) > limit:
            raise file_error(path, f"holds more than {limit:,} bytes")
        if not data:
            raise file_error(path, "is empty", hint="the save or the upload was cut short")
        check_not_lfs(data, path)
        return data

    @contextmanager
    def open(self, name: str, extent: Extent | None = None) -> Iterator[Any]:
        """A file to be read by ranges; what of it will be read, where that is known."""
        with RemoteFile(self.bucket, self._key(name), extent) as file:
            yield file

    def copy_to(self, target: str) -> None:
        """What stands at the path, a file or a folder of files, as a new local one."""
        for name in self.sizes_below("") or [""]:
            path = os.path.normpath(f"{target}/{check_name(name, self.path)}")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(self.bucket.fetch(self._prefix + name if name else self._prefix.rstrip("/")) or b"")

    def write(self, name: str, data: bytes) -> None:
        """A small file, over an old one."""
        self.bucket.write(self._key(name), data)

    def expect(self, extents: Iterable[tuple[str, int, int]]) -> None:
        """Announce `(file, offset, length)` of what will be opened, so that neighbours are read together."""
        self.bucket.ranges.plan([(self._key(name), offset, length) for name, offset, length in extents])


@dataclass
class Bucket:
    """One bucket, as long as a checkpoint in it is open: what is in it, its small files, the ranges being read."""

    url: str
    _listings: dict[str, list[str]] = field(default_factory=dict, repr=False)  # by prefix; sorted
    _small: dict[str, bytes | None] = field(default_factory=dict, repr=False)

    def spec(self, path: str) -> dict[str, Any]:
        """TensorStore's spec of a path."""
        scheme, _, name = self.url.partition("://")
        out = {"driver": SCHEMES[f"{scheme}://"], "bucket": name, "path": path}
        return out | _s3_settings() if scheme == "s3" else out

    @cached_property
    def kvstore(self) -> Any:
        """The whole bucket."""
        import tensorstore as ts

        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with self.errors(""):
            return ts.KvStore.open(self.spec(""), context=ts.Context(CONTEXT)).result(_SECONDS)

    @cached_property
    def ranges(self) -> "Ranges":
        """What is read together."""
        return Ranges(self)

    @property
    def listed(self) -> bool:
        """Whether anything was listed yet."""
        return bool(self._listings)

    def is_listed(self, prefix: str) -> bool:
        """Whether what lies below a prefix is known."""
        return any(prefix.startswith(known) for known in tuple(self._listings))

    def keys_below(self, prefix: str) -> list[str]:
        """All names below a prefix, sorted."""
        known = next((known for known in tuple(self._listings) if prefix.startswith(known)), None)
        if known is None:
            self._listings[prefix] = self._list(prefix, prefix)
            known = prefix
        keys = self._listings[known]
        return keys if prefix == known else keys[bisect_left(keys, prefix) : bisect_left(keys, _after(prefix))]

    def _list(self, prefix: str, start: str) -> list[str]:
        """The names below a prefix from one on, sorted.

        TensorStore's driver for gs:// takes a page that was refused for the last one. So where a page could have ended
        the rest is asked for again, and a file: that is refused with an error.
        """
        import tensorstore as ts

        with self.errors(prefix):
            keys = self.kvstore.list(ts.KvStore.KeyRange(start, _after(prefix))).result(_SECONDS)
        found = sorted(key.decode("utf-8", "surrogateescape") for key in keys)
        if self.url.startswith("gs") and found and len(found) % _PAGE == 0:
            rest = self._list(prefix, f"{found[-1]}\0")
            found += rest
            if not rest:
                self.fetch(found[-1], 0, 0)
        return found

    def has(self, key: str) -> bool:
        """Whether there is a file of this name."""
        known = next((keys for prefix, keys in tuple(self._listings.items()) if key.startswith(prefix)), None)
        if known is not None:
            at = bisect_left(known, key)
            return at < len(known) and known[at] == key
        return self.fetch(key, 0, 0) is not None

    def read_small(self, key: str) -> bytes | None:
        """A whole file, kept if it is small; None where there is none."""
        if self.is_listed(key) and not self.has(key):
            return None
        if key not in self._small:
            data = self.fetch(key)
            if data is not None and len(data) > _SMALL_FILE:
                return data
            self._small[key] = data
        return self._small[key]

    def fetch(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes of a file, fewer where it ends before `stop`; None where there is none."""
        return self.result(key, self.start(key, start, stop), start)

    def write(self, key: str, data: bytes) -> None:
        """A whole file."""
        self.finish_writing(key, self.start_writing(key, data), len(data))

    def start_writing(self, key: str, data: bytes) -> Any:
        """Begin to send a whole file."""
        with self.errors(key):
            return self.kvstore.write(key, data)

    def finish_writing(self, key: str, pending: Any, size: int) -> None:
        """Wait until it is there; a large one may take longer."""
        with self.errors(key):
            pending.result(_SECONDS + size // _SLOWEST_BYTES)

    def delete(self, key: str) -> None:
        """Remove a file."""
        with self.errors(key):
            self.kvstore.write(key, None).result(_SECONDS)

    def start(self, key: str, start: int, stop: int | None) -> Any:
        """Begin to read a range."""
        whole = start == 0 and stop is None
        return self.kvstore.read(key, byte_range=None if whole else slice(start, stop))

    def result(self, key: str, pending: Any, start: int) -> bytes | None:
        """What was begun at `start`; a range beyond the file's end is read again up to there."""
        with self.errors(key):
            try:
                found = pending.result(_SECONDS)
            except ValueError as error:
                if "OUT_OF_RANGE" not in str(error):
                    raise
                total = _TOTAL.search(str(error))
                if total is None or int(total[1]) <= start:
                    return b""
                found = self.start(key, start, int(total[1])).result(_SECONDS)
        return found.value if found.state == "value" else None

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """What a store answers, in one line."""
        try:
            yield
        except CheckpointError:
            raise
        except TimeoutError:
            raise CheckpointError(f"no answer within {_SECONDS} seconds", where=self._where(key)) from None
        except Exception as error:
            problem, hint = _told(self.url, str(error))
            raise CheckpointError(problem, where=self._where(key), hint=hint) from None

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")


def _after(prefix: str) -> str:
    """The first text after all that begin with a prefix that ends in `/`."""
    return f"{prefix[:-1]}0" if prefix else ""


def _told(url: str, text: str) -> tuple[str, str | None]:
    """What is wrong, and what helps."""
    from orbaxkit.formats.ocdbt import short_reason

    status = _STATUS.search(text)
    code = status[1] if status else ""
    if code in ("401", "403") or "PERMISSION_DENIED" in text or "UNAUTHENTICATED" in text:
        login = "gcloud auth application-default login" if url.startswith("gs") else "AWS_PROFILE or AWS_ACCESS_KEY_ID"
        return f"access is denied ({code or 'no permission'})", f"credentials are those of the environment: {login}"
    if code == "404" or "NOT_FOUND" in text:
        return f"there is no bucket {url} (404)", None
    if code:
        return f"the store answers {code}, after {_RETRIES['max_retries']} more tries", None
    reason = text.partition("attempts failed: ")[2] or text
    return f"the store cannot be reached: {short_reason(Exception(reason))}", None


def _s3_settings() -> dict[str, Any]:
    """What AWS' own tools take from the environment and TensorStore does not."""
    known = os.environ.get
    endpoint = known("AWS_ENDPOINT_URL_S3") or known("AWS_ENDPOINT_URL")
    region = known("AWS_REGION") or known("AWS_DEFAULT_REGION")
    out: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if known("AWS_ACCESS_KEY_ID"):  # the first place that is looked into; naming it keeps the others off stderr
        out["aws_credentials"] = {"type": "environment"}
    return out | ({"aws_region": region} if region else {})


@dataclass
class RemoteFile:
    """A file that is read by ranges, safe for one thread."""

    bucket: Bucket = field(repr=False)
    key: str
    extent: Extent | None
    _at: int = 0
    _start: int = 0
    _data: bytes = b""
    _next: tuple[int, Any] | None = None  # where the window that is on its way begins

    def __enter__(self) -> "RemoteFile":
        if self.extent is not None:
            held = self.bucket.ranges.take(self.key, self.extent)
            if held is not None:
                self._start, self._data = held
        return self

    def __exit__(self, *_: object) -> None:
        self._data, self._next = b"", None

    def pread(self, size: int, offset: int) -> bytes:
        """Bytes at a place; fewer at the file's end."""
        inside = offset - self._start
        if not 0 <= inside < len(self._data):
            self._load(offset, size)
            inside = 0
        return self._data[inside : inside + size]

    def _load(self, offset: int, size: int) -> None:
        end = sum(self.extent) if self.extent is not None else offset + size
        stop = max(offset + size, min(end, offset + _WINDOW_BYTES))
        if self._next is not None and self._next[0] == offset:
            pending = self._next[1]
        else:
            pending = self.bucket.start(self.key, offset, stop)
        self._next = None
        if stop < end:
            self._next = stop, self.bucket.start(self.key, stop, min(end, stop + _WINDOW_BYTES))
        data = self.bucket.result(self.key, pending, offset)
        if data is None:
            raise file_error(f"{self.bucket.url}/{self.key}", "is missing")
        self._start, self._data = offset, data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        """Go on reading there, or so much further."""
        self._at = offset if whence == os.SEEK_SET else self._at + offset

    def tell(self) -> int:
        """Where it goes on."""
        return self._at

    def readinto(self, view: memoryview) -> int:
        """Fill `view`; how many bytes there were."""
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data = self.pread(size, self._at)
        while 0 < len(data) < size and (more := self.pread(size - len(data), self._at + len(data))):
            data += more
        self._at += len(data)
        return data

    def load(self) -> int:
        """Read the whole file into memory; its size."""
        data = self.bucket.fetch(self.key)
        if data is None:
            raise file_error(f"{self.bucket.url}/{self.key}", "is missing")
        self._start, self._data = 0, data
        return len(data)


@dataclass
class _Range:
    """Values of one file that are read together; `waiting` of them were not taken yet."""

    key: str
    start: int
    stop: int
    waiting: int = 1
    data: bytes | None = None
    is_gone: bool = False
    lock: Lock = field(default_factory=Lock)


@dataclass
class Ranges:
    """What was announced, joined to ranges; each is read when the first of its values is opened."""

    bucket: Bucket
    _by_file: dict[str, list[_Range]] = field(default_factory=dict)
    _held: "OrderedDict[int, _Range]" = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def plan(self, extents: Iterable[tuple[str, int, int]]) -> None:
        """Join neighbours."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for key, offset, length in extents:
            if length <= _WINDOW_BYTES:
                wanted.setdefault(key, []).append((offset, offset + length))
        most = max(_SMALLEST_RANGE, min(_WINDOW_BYTES, _HELD_BYTES // max(1, len(wanted))))
        with self._lock:
            for key, spans in wanted.items():
                known = [each for each in self._by_file.get(key, ()) if not each.is_gone]
                self._by_file[key] = sorted([*known, *_joined(key, sorted(spans), most)], key=lambda r: r.start)

    def take(self, key: str, extent: Extent) -> tuple[int, bytes] | None:
        """Where a range that holds an extent begins, and its bytes; None for one that was not announced, or is gone."""
        found = self._by_file.get(key, [])
        at = bisect_right(found, extent[0], key=lambda r: r.start) - 1
        if at < 0 or found[at].stop < sum(extent) or found[at].is_gone:
            return None
        wanted = found[at]
        with wanted.lock:
            if wanted.data is None:
                wanted.data = self.bucket.fetch(key, wanted.start, wanted.stop)
                self._hold(wanted)
            data = wanted.data
            wanted.waiting -= 1
            if not wanted.waiting:
                self._let_go(wanted)
        return None if data is None else (wanted.start, data)

    def _hold(self, found: _Range) -> None:
        """Keep within the limit: what was read first goes first."""
        with self._lock:
            self._held[id(found)] = found
            while sum(each.stop - each.start for each in self._held.values()) > _HELD_BYTES and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                oldest.is_gone, oldest.data = True, None

    def _let_go(self, found: _Range) -> None:
        with self._lock:
            self._held.pop(id(found), None)
            found.is_gone, found.data = True, None


def _joined(key: str, spans: list[tuple[int, int]], most: int) -> list[_Range]:
    out: list[_Range] = []
    for start, stop in spans:
        last = out[-1] if out else None
        if last is not None and start - last.stop <= _GAP_BYTES and stop - last.start <= most:
            last.stop, last.waiting = max(last.stop, stop), last.waiting + 1
        else:
            out.append(_Range(key, start, stop))
    return out
