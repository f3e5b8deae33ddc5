"""Measure child processes: time, peak memory, and what they report. Standard library only.

A child's ru_maxrss starts at what its parent held when it was started, so a driver imports nothing heavy and leaves the
writing of checkpoints to a child as well.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

MB = 1_000_000


@dataclass(frozen=True)
class Run:
    """One finished child: wall seconds from start to exit, peak resident bytes, the JSON it printed last."""

    seconds: float
    peak_bytes: int
    report: Any


def run(*command: str, env: dict[str, str] | None = None) -> Run:
    """Run a command to its end; one that fails takes the benchmark down with its stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            sys.exit(f"{' '.join(command)} ended with {child.returncode}\n{err.read()[-4000:]}")
        return Run(seconds, usage.ru_maxrss * 1024, _last_json(out.read()))


def python(script: str, *args: str, env: dict[str, str] | None = None) -> Run:
    """Run a script with this interpreter."""
    return run(sys.executable, script, *args, env=env)


def interleaved(ways: dict[str, Any], rounds: int) -> dict[str, list[Any]]:
    """Call each way once per round, so that a slow minute of the machine hits all of them."""
    results: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(way())
    return results


def warm_memory(size: int) -> None:
    """Touch memory in a child: the first touch since a virtual machine booted is many times slower than later ones."""
    run(sys.executable, "-c", f"b = bytearray({size})\nfor i in range(0, {size}, 4096): b[i] = 1")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text under their keys."""
    heads = list(rows[0])
    cells = [heads, *([f"{row[h]:.3g}" if isinstance(row[h], float) else str(row[h]) for h in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def verdict(name: str, value: float, most: float) -> dict[str, Any]:
    """One row that compares what was measured with what is wanted."""
    return {"measured": name, "value": value, "at most": most, "met": "yes" if value <= most else "NO"}


def _last_json(text: str) -> Any:
    lines = text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def bytes_read() -> int:
    """The bytes that this process has read from files so far, by whatever library (Linux counts them)."""
    with open("/proc/self/io") as counters:
        return int(counters.readline().split()[1])
