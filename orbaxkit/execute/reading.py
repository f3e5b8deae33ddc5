"""Read regions of stored arrays into aligned host buffers, with a bound on the bytes in flight."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Pending, Source
from orbaxkit.planning import Plan

# Enough to keep two cores and a disk busy; a leaf larger than this still reads, alone.
IN_FLIGHT_BYTES = 256 << 20

# jax.device_put takes a host buffer as it is on CPU only where it starts at a multiple of this.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-ordered array whose bytes start at a multiple of 64."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


@dataclass
class BoundedReads:
    """Starts reads in order and finishes them in order, never with more than a budget in flight beyond the oldest."""

    budget: int = IN_FLIGHT_BYTES
    _queue: deque[tuple[int, Pending, Callable[[], None]]] = field(default_factory=deque)
    _in_flight: int = 0

    def start(
        self, source: Source, name: str, index: tuple[slice, ...], out: np.ndarray, then: Callable[[np.ndarray], None]
    ) -> None:
        """Read a region of a leaf into `out`; `then(out)` runs once it is there."""
        if out.nbytes == 0:
            then(out)
            return
        while self._queue and self._in_flight + out.nbytes > self.budget:
            self._finish_oldest()
        pending = source.read(name, index, out)
        self._queue.append((out.nbytes, pending, lambda: then(out)))
        self._in_flight += out.nbytes

    def finish(self) -> None:
        """Wait for everything that was started."""
        while self._queue:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        nbytes, pending, then = self._queue.popleft()
        pending.result()
        then()
        self._in_flight -= nbytes


def check_readable(plan: Plan, source: Source) -> None:
    """Refuse, before a byte is read, leaves whose data is missing or cut short."""
    problems = source.problems(plan.reads)
    for foreign, name in plan.foreign_reads:
        problems += foreign.source.problems([name])
    if problems:
        raise CheckpointError(
            f"{len(problems)} {'leaf' if len(problems) == 1 else 'leaves'} cannot be read: data is missing or damaged",
            leaves=problems,
            hint="the others can be restored: leave these out with ok.drop(...)"
            if len(problems) < len(plan.reads)
            else None,
        )


def check_memory(nbytes: int) -> None:
    """Refuse what would not fit in the memory that is free."""
    available = _available_memory()
    if available is not None and nbytes > available:
        raise CheckpointError(
            f"{nbytes:,} bytes would be read, {available:,} bytes of memory are free",
            hint="restore fewer leaves: ok.restore(path, ok.select('params/**'))",
        )


def _available_memory() -> int | None:
    """What the machine has free, or what is left of the limit of a container."""
    known = [free for free in (_free_on_machine(), _free_in_container()) if free is not None]
    return min(known, default=None)


def _free_on_machine() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _free_in_container() -> int | None:
    """The limit of a control group (v2) less what it uses; cached file pages count as free."""
    try:
        limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        return int(limit) - int(used) + int(cached)
    except (OSError, KeyError, ValueError):
        return None
