"""SIGTERM ends a command as Ctrl-C does: what was begun is removed first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block, SIGTERM raises SystemExit(143)."""

    def end(*_: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
