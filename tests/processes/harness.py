"""Run a function in several processes that `jax.distributed` joins on this machine, each with fake CPU devices.

    def shapes(path):  # at the top of a module; imported anew in every process
        import jax
        return jax.process_index(), len(jax.devices())

    assert [ended.value for ended in run_processes(2, shapes, path)] == [(0, 8), (1, 8)]

What a function returns goes through a file: gloo prints to stdout. A process may end itself (`os._exit`, a signal);
the others keep what they have and are let go once each of them has ended or returned.
"""

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How one process ended: `code` 0 with a value, else its exit code; None where it was stopped for being late."""

    code: int | None
    value: Any = None
    error: str = ""  # the traceback of an exception, or the last lines that were printed


def run_processes(
    count: int, function: Callable[..., Any], *args: Any, devices: int = 4, timeout: float = 120, may_fail: bool = False
) -> list[Ended]:
    """Call `function(*args)` in `count` processes; how each ended, by process index.

    Raises AssertionError with what they said where one did not return, unless that `may_fail`.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function.__code__.co_filename, function.__name__, args)))
        address = f"127.0.0.1:{_free_port()}"
        started = [_start(Path(folder, str(k)), str(call), address, count, k, devices) for k in range(count)]
        try:
            _wait(started, Path(folder), time.monotonic() + timeout)
            ended = [_ended(process, Path(folder, str(k))) for k, process in enumerate(started)]
        finally:
            for process in started:
                process.kill()
                process.wait()
    failed = [f"process {k} ended with {one.code}:\n{one.error}" for k, one in enumerate(ended) if one.code != 0]
    if failed and not may_fail:
        raise AssertionError("\n\n".join(failed))
    return ended


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _start(own: Path, *args: Any) -> subprocess.Popen:
    *call, devices = map(str, args)
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    with own.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(own), *call], stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
        )


def _wait(started: list[subprocess.Popen], folder: Path, deadline: float) -> None:
    """Until every process has ended or returned; then let those go that wait for the others."""

    def is_settled(k: int, process: subprocess.Popen) -> bool:
        return process.poll() is not None or Path(folder, str(k)).exists()

    while time.monotonic() < deadline and not all(is_settled(k, process) for k, process in enumerate(started)):
        time.sleep(0.02)
    for k, process in enumerate(started):
        if is_settled(k, process):
            process.stdin.close()
            process.wait(10)


def _ended(process: subprocess.Popen, own: Path) -> Ended:
    if own.exists():
        return Ended(*pickle.loads(own.read_bytes()))
    return Ended(process.poll(), error=own.with_suffix(".log").read_text(errors="replace")[-3000:])


def _main(own: str, call: str, address: str, count: str, index: str) -> None:
    """One process: join the others, call, leave what came of it in a file, wait to be let go."""
    import jax

    jax.distributed.initialize(
        address,
        int(count),
        int(index),
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=3,
    )
    path, name, args = pickle.loads(Path(call).read_bytes())
    try:
        spec = importlib.util.spec_from_file_location("called", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["called"] = module
        spec.loader.exec_module(module)
        ended = 0, getattr(module, name)(*args), ""
    except BaseException:
        ended = 1, None, traceback.format_exc()
    part = Path(f"{own}.part")
    part.write_bytes(pickle.dumps(ended))
    part.rename(own)
    if ended[0] == 0:  # one that failed leaves at once, so that nobody waits for it in a collective
        sys.stdin.read()
    os._exit(ended[0])  # the barrier of a normal exit would hang where another one is dead


if __name__ == "__main__":
    _main(*sys.argv[1:])
