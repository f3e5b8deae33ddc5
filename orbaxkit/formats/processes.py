"""Several processes that write one checkpoint together: who they are, what they tell each other, when one is given up.

They talk through the key-value store of JAX's coordination service, which process 0 hosts: a thread of each publishes
its state and reads everybody's. All waiting is waiting for states, so nothing waits without an end, and whoever fails,
dies or hangs is noticed by all while they work. What a store that does not answer blocks is that thread alone.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from orbaxkit.errors import CheckpointError, NotInvertibleError, OrbaxkitError, TargetError, TransformError

# JAX ends every process 100 s after one was last heard of; an error of ours comes before that.
ARRIVAL_SECONDS = 90.0  # from the first call to the last one's
SILENCE_SECONDS = 30.0  # without any sign of life: dead, stopped, or stuck in a caller's function
STALL_SECONDS = 600.0  # alive, but no further: a disk that does not answer

_PARTING_SECONDS = 0.5
_POLL_SECONDS = 0.01
_EXCHANGE_SECONDS = 0.5  # from one exchange to the next while this process works
_MOST_TEXT = 4000  # of an error that others are told
_CLASSES = {each.__name__: each for each in (CheckpointError, TargetError, TransformError, NotInvertibleError)}
_calls = itertools.count()


@runtime_checkable
class Store(Protocol):
    """What is used of JAX's client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Publish."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Read all below a key."""

    def key_value_delete(self, key: str) -> None:
        """Remove all below a key."""


@dataclass
class _Peer:
    """What is known of one process."""

    signs: int = -1  # that it gave so far; -1 before its first
    moved: int = 0  # grows with its work
    told: dict[str, Any] = field(default_factory=dict)
    failure: tuple[int, str, str] | None = None  # which process failed, and the class and text of its error
    heard_at: float = 0.0
    moved_at: float = 0.0

    def hear(self, message: dict[str, Any], now: float) -> None:
        """Take in what it published."""
        if message["signs"] != self.signs:
            self.heard_at = now
        if message["moved"] != self.moved or message["told"] != self.told:
            self.moved_at = now
        self.signs, self.moved, self.told = message["signs"], message["moved"], message["told"]
        self.failure = message["failure"] and tuple(message["failure"])

    def problem(self, now: float) -> str | None:
        """Why it is to be given up."""
        silent, still = now - self.heard_at, now - self.moved_at
        if self.signs < 0:
            return (
                f"has not called convert within {ARRIVAL_SECONDS:g} s: all call it"
                if silent > ARRIVAL_SECONDS
                else None
            )
        if silent > SILENCE_SECONDS:
            return f"has shown no sign of life for {SILENCE_SECONDS:g} s"
        return f"has got no further for {STALL_SECONDS:g} s" if still > STALL_SECONDS else None


@dataclass
class Processes:
    """The processes that make one call together, as one of them sees it. One that is alone neither talks nor waits."""

    index: int = 0
    count: int = 1
    store: Store | None = None
    call: int = 0  # all make the same calls: the number says which belong together
    _own: _Peer = field(default_factory=_Peer)
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _is_busy: bool = False
    _raised: tuple[BaseException, tuple[int, str, str]] | None = None  # for what another one did
    _rounds: int = 0
    _round_at: float = 0.0
    _asked_at: float | None = None
    _unreachable: str | None = None
    _is_hurried: bool = False  # while it waits for others
    _is_over: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that does what is done once."""
        return self.index == 0

    def start(self) -> None:
        """Begin to talk."""
        if self.store is None:
            return
        self._round_at = now = time.monotonic()
        self._own.signs = 0
        self._peers = {i: _Peer(heard_at=now, moved_at=now) for i in range(self.count) if i != self.index}
        threading.Thread(target=self._talk, name="orbaxkit-processes", daemon=True).start()

    def stop(self) -> None:
        """Fall silent."""
        self._is_over = True
        self._wake.set()

    def alive(self, moved: int) -> None:
        """Give a sign of life, with a number that grows with the work. Raises OrbaxkitError: another one is lost."""
        self._own.signs += 1
        self._own.moved = moved
        self._check()

    def further(self) -> None:
        """Give a sign of life, with one step of work done."""
        self.alive(self._own.moved + 1)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Calls that can give no signs themselves; the thread does meanwhile, and that nothing moves is noticed."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def tell(self, what: str, value: Any = None) -> None:
        """Let the others know something that JSON can hold; `wait` waits for it."""
        self._own.told = {**self._own.told, what: value}
        self._wake.set()

    def wait(self, what: str, of: Iterable[int] | None = None) -> dict[int, Any]:
        """Wait until all others, or those named, have told something. Raises OrbaxkitError: one of them is lost."""
        peers = {i: self._peers[i] for i in (self._peers if of is None else of)}
        self._hurry()
        while not all(what in peer.told for peer in peers.values()):
            self.further()
            time.sleep(_POLL_SECONDS)
        self._is_hurried = False
        return {i: peer.told[what] for i, peer in peers.items()}

    def agree(self, digest: str) -> None:
        """Refuse to go on with others that are about to do something else."""
        self.tell("digest", digest)
        other = [i for i, value in self.wait("digest").items() if value != digest]
        if other:
            raise OrbaxkitError(
                f"process {other[0]} of {self.count} would write something else than process {self.index}",
                hint="all of them call convert with the same arguments, and see the same source",
            )

    def fail(self, error: BaseException) -> None:
        """Tell the others, and wait until none of them works any more, or it is given up."""
        if self.store is None:
            return
        if self._raised is not None and self._raised[0] is error:
            self._own.failure = self._raised[1]
        else:
            text = str(error) if isinstance(error, OrbaxkitError) else f"{type(error).__name__}: {error}"
            self._own.failure = (self.index, type(error).__name__, text[:_MOST_TEXT])
        end = time.monotonic() + SILENCE_SECONDS
        with self.busy():
            self._flush(end)
            self._await(lambda peer: peer.failure is not None, end)
            self.tell("stopped")
            self._flush(end)
            if self.is_first:  # without it JAX ends the others at once: let them say first what they have to say
                self._await(lambda peer: "stopped" in peer.told, end)
                time.sleep(_PARTING_SECONDS)

    def _await(self, is_met: Callable[[_Peer], bool], end: float) -> None:
        """Wait for every process that is still there, until a time."""
        while time.monotonic() < end and any(self._works(peer) and not is_met(peer) for peer in self._peers.values()):
            time.sleep(_POLL_SECONDS)

    def finish(self) -> None:
        """Meet at the end: the others hear from the first that all is done."""
        if self.store is None:
            return
        if not self.is_first:
            self.wait("finished", [0])
            self.tell("finished")
            self._flush(time.monotonic() + SILENCE_SECONDS)
            return
        self.tell("finished")
        with suppress(OrbaxkitError):  # it is done, whatever became of them
            self.wait("finished")
        self.store.key_value_delete(f"orbaxkit/{self.call - 1}/")  # all have left that one behind, not yet this one

    def _works(self, peer: _Peer) -> bool:
        is_there = peer.signs >= 0 and "finished" not in peer.told and self._unreachable is None
        return is_there and peer.problem(self._round_at) is None

    def _check(self) -> None:
        """Raise for the first process that failed or is lost."""
        heard = [(i, peer.failure) for i, peer in self._peers.items() if peer.failure is not None]
        for i, (origin, kind, text) in sorted(heard, key=lambda pair: pair[0] != pair[1][0]):
            prefix = f"process {i} of {self.count} failed: " if i == origin else ""  # who tells of another has said it
            raise self._lost(origin, kind, prefix + text)
        for i, peer in self._peers.items():
            if problem := peer.problem(self._round_at):
                raise self._lost(i, "OrbaxkitError", f"process {i} of {self.count} {problem}")
        if self._unreachable or (self._asked_at and time.monotonic() - self._asked_at > SILENCE_SECONDS):
            reason = self._unreachable or f"no answer within {SILENCE_SECONDS:g} s"
            text = f"process 0 of {self.count}, through which all talk, is lost: {reason}"
            raise self._lost(0, "OrbaxkitError", text)

    def _lost(self, origin: int, kind: str, text: str) -> OrbaxkitError:
        error = _CLASSES.get(kind, OrbaxkitError)(text)
        self._raised = error, (origin, kind, text)
        return error

    def _flush(self, end: float) -> None:
        """Wait until what was told last is published."""
        self._hurry()
        goal = self._rounds + 2  # the one under way may have begun before
        while self._rounds < goal and self._unreachable is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _hurry(self) -> None:
        self._is_hurried = True
        self._wake.set()

    def _talk(self) -> None:
        short = 0.02 + 0.002 * self.count  # each reads all states: what process 0 has to answer grows as the square
        while not self._is_over:
            self._wake.clear()
            try:
                self._exchange()
            except Exception as error:  # JAX's, of which the class is private
                self._unreachable = str(error).split("\n")[0]
                return
            self._wake.wait(short if self._is_hurried else max(short, _EXCHANGE_SECONDS))

    def _exchange(self) -> None:
        """Publish this process's state and read the others'."""
        if self.store is None:
            return
        own = self._own
        own.signs += self._is_busy
        message = {"signs": own.signs, "moved": own.moved, "told": own.told, "failure": own.failure}
        self._asked_at = time.monotonic()
        self.store.key_value_set(f"orbaxkit/{self.call}/{self.index}", json.dumps(message), allow_overwrite=True)
        found = self.store.key_value_dir_get(f"orbaxkit/{self.call}/")
        now, self._asked_at = time.monotonic(), None
        for key, text in found:
            peer = self._peers.get(int(key.rsplit("/", 1)[1]))
            if peer is not None:
                peer.hear(json.loads(text), now)
        self._round_at = now
        self._rounds += 1


@contextmanager
def together() -> Iterator[Processes]:
    """The processes that `jax.distributed` connects, for one call that all of them make; else this one alone.

    An error inside is told to the others, and leaves here when none of them works any more: clean up then.
    """
    processes = _connected()
    processes.start()
    try:
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    finally:
        processes.stop()


def _connected() -> Processes:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return Processes()
    from jax._src.distributed import global_state  # the only way to the store, which Orbax goes, too

    if global_state.client is None or global_state.num_processes < 2:
        return Processes()
    return Processes(global_state.process_id, global_state.num_processes, global_state.client, next(_calls))
