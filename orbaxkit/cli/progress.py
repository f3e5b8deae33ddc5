"""Progress on stderr: a bar on a terminal, a line per tenth where it is piped."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orbaxkit.display.text import human_bytes


@contextmanager
def reporting(what: str) -> Iterator[Any]:
    """A function of (bytes done, bytes in all) to hand to a verb."""
    if sys.stderr.isatty():
        with _bar(what) as report:
            yield report
    else:
        yield Lines(what)


class Lines:
    """One line per tenth, with the speed and the time that is left."""

    def __init__(self, what: str, clock: Any = time.monotonic):
        self._what, self._clock, self._start, self._told = what, clock, clock(), 0

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is, if another tenth is done."""
        tenth = 10 if done >= total else done * 10 // total
        if tenth <= self._told:
            return
        self._told = tenth
        seconds = max(self._clock() - self._start, 1e-9)
        left = seconds * (total - done) / max(done, 1)
        print(
            f"{self._what} {tenth * 10} %  {human_bytes(done)} of {human_bytes(total)}  "
            f"{human_bytes(int(done / seconds))}/s  {_clock_text(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _bar(what: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=max(total, 1))
