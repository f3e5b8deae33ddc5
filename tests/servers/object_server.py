"""A store in memory that speaks as much of S3 and of Google Cloud Storage as TensorStore's drivers do.

    with ObjectServer() as server:
        server.put_tree("bucket", "runs/1", folder)
        server.faults = [Fault(503, every=5), Fault("cut", key="/d/", times=1)]
        ...
        assert [each.key for each in server.log if each.status == 200] == [...]

What should go wrong goes wrong on demand. Signatures are not checked; conditions are: 304 and 412.
"""

import os
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, SO_LINGER, SOL_SOCKET, socket
from typing import Any, Literal

from servers.protocols import Answer, Ask, answered, forwarded


@dataclass(frozen=True)
class Request:
    """A request that was answered, or was not: status 0. For a listing, `key` is the prefix or where it begins."""

    method: str
    bucket: str
    key: str
    range: str | None  # "0-99", or None where the whole was asked for
    status: int
    sent: int  # bytes of the body
    is_list: bool


@dataclass
class Fault:
    """What goes wrong, at every `every`-th of the requests that it concerns, `times` times at most.

    A status, the connection reset, the body cut in the middle, a bit of it flipped, or no answer at all until the
    server is reset. Concerned are all requests, or those whose method is `method` and whose bucket/key has `key` in it,
    which for a listing is bucket/?prefix.
    """

    what: int | Literal["reset", "cut", "flip", "hang"]
    every: int = 1
    times: int | None = None
    key: str = ""
    method: str = ""
    concerned: int = field(default=0, init=False)
    struck: int = field(default=0, init=False)

    def strikes(self, ask: Ask) -> bool:
        """Whether it happens to this request; counts it."""
        if self.key not in ask.place or self.method not in ("", ask.method):
            return False
        self.concerned += 1
        is_struck = self.concerned % self.every == 0 and self.struck != self.times
        self.struck += is_struck
        return is_struck


@dataclass
class ObjectServer:
    """Both stores on one port of this machine; a bucket is in both. Its buckets are those of `objects`."""

    objects: dict[str, dict[str, bytes]] = field(default_factory=dict, repr=False)  # by bucket and key
    forward: dict[str, str] = field(default_factory=dict)  # buckets that another server has: its URL
    log: list[Request] = field(default_factory=list, repr=False)
    faults: list[Fault] = field(default_factory=list)  # the first that strikes
    forbidden: set[str] = field(default_factory=set)  # beginnings of bucket/key, or of bucket/?prefix
    latency: float = 0  # seconds, of each request
    most_at_once: int = 0

    def __post_init__(self) -> None:
        """Listen, on a free port."""
        self._at_once = 0
        self._retired: set[str] = set()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.store = self
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> "ObjectServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    s3_endpoint = gcs_endpoint = url

    def close(self) -> None:
        """Hang up on everyone, and end."""
        self._http.shutdown()
        self._released.set()
        self._http.hang_up()
        self._http.server_close()

    def reset(self) -> None:
        """Keep the objects; forget faults, the log and what is forbidden. Requests that hang are hung up on."""
        self.faults, self.latency = [], 0
        self.forbidden.clear()
        self._released.set()
        self._released = threading.Event()
        self.clear_log()

    def clear_log(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self.log.clear()
            self.most_at_once = self._at_once

    def put_tree(self, bucket: str, prefix: str, folder: str | os.PathLike[str]) -> None:
        """Make every file below a folder an object below `prefix`."""
        root = Path(folder)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        with self._lock:
            kept = self.objects.setdefault(bucket, {})
            kept |= {f"{prefix.strip('/')}/{name}".lstrip("/"): data for name, data in files.items()}

    def retire(self, bucket: str) -> None:
        """Delete a bucket. What is still asked about it, by tries that nobody waits for, is not logged any more."""
        with self._lock:
            self.objects.pop(bucket, None)
            self._retired.add(bucket)

    def requests(self, key: str = "") -> list[Request]:
        """What was asked about objects that have `key` in their name."""
        with self._lock:
            return [each for each in self.log if key in each.key and not each.is_list]

    def count(self, by: int) -> None:
        """One request more, or less, is being answered."""
        with self._lock:
            self._at_once += by
            self.most_at_once = max(self.most_at_once, self._at_once)

    def fault(self, ask: Ask) -> Any:
        """What goes wrong with a request, or None; comes back late where it hangs."""
        time.sleep(self.latency)
        with self._lock:
            faults = [] if ask.bucket in self._retired else self.faults
            what = next((fault.what for fault in faults if fault.strikes(ask)), None)
            released = self._released
        if what in ("reset", "hang"):
            self.note(ask, 0, 0)
        if what == "hang":
            released.wait()
        return what

    def note(self, ask: Ask, status: int, sent: int) -> None:
        """Log a request."""
        span = ask.headers.get("Range")
        made = Request(ask.method, ask.bucket, ask.name, span and span[len("bytes=") :], status, sent, ask.is_list)
        with self._lock:
            if ask.bucket not in self._retired:
                self.log.append(made)

    def answer(self, ask: Ask) -> Answer:
        """What a store would."""
        if any(ask.place.startswith(each) for each in self.forbidden):
            return ask.error(403)
        if ask.bucket in self.forward:
            return forwarded(ask, self.forward[ask.bucket])
        with self._lock:
            if ask.makes_bucket:
                self.objects.setdefault(ask.bucket, {})
                return ask.created_bucket()
            if ask.bucket not in self.objects:
                return ask.error(404)
            return answered(ask, self.objects[ask.bucket])


class _Http(ThreadingHTTPServer):
    """Keeps the connections, so that it can hang up."""

    store: ObjectServer
    daemon_threads = False
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self._open: set[socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        request.close()  # no polite end before it: a reset is to be one

    def hang_up(self) -> None:
        for each in list(self._open):
            try:
                each.shutdown(SHUT_RDWR)
            except OSError:  # is gone
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Http
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # with headers and body in two packets each answer would take 40 ms
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        ask = Ask.of(self.command, self.path, self.headers, body)
        store = self.server.store
        store.count(1)
        try:
            what = store.fault(ask)
            if what in ("reset", "hang"):
                self.close_connection = True
                self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", what == "reset", 0))
            else:
                self._send(ask, ask.error(what) if isinstance(what, int) else store.answer(ask), what)
        finally:
            store.count(-1)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, ask: Ask, answer: Answer, what: Any) -> None:
        has_body = ask.method != "HEAD" and answer.status not in (204, 304)
        body = answer.body if has_body else b""
        middle = len(body) // 2
        if what == "cut":
            body = body[:middle]
            self.close_connection = True
        elif what == "flip" and body:
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.server.store.note(ask, answer.status, len(body))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(body)
