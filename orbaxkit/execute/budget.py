"""Bytes of memory that workers share, and how the first error ends all of them."""

import threading
from dataclasses import dataclass, field


class _Stopped(Exception):
    """Another job failed."""


@dataclass
class Budget:
    """Bytes that workers share. What alone is more than all of them waits until nothing else is held."""

    total: int
    _held: int = 0
    _stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def of(self, count: int) -> "_Hold":
        """Hold so many bytes for a `with` block."""
        return _Hold(self, count)

    def check(self) -> None:
        """End this job if another one failed."""
        if self._stopped:
            raise _Stopped

    def stop(self) -> None:
        """End all jobs at their next step."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def take(self, count: int) -> None:
        """Wait until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._held or self._held + count <= self.total)
            self.check()
            self._held += count

    def give_back(self, count: int) -> None:
        """Make room."""
        with self._changed:
            self._held -= count
            self._changed.notify_all()


@dataclass(frozen=True)
class _Hold:
    budget: Budget
    count: int

    def __enter__(self) -> None:
        self.budget.take(self.count)

    def __exit__(self, *_: object) -> None:
        self.budget.give_back(self.count)
