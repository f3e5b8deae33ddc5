"""Work shared out by bytes, and what processes tell each other: without processes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit.execute.sharing import Job, share, values_of
from orbaxkit.formats import processes as talking
from orbaxkit.formats.processes import Processes, together
from orbaxkit.formats.staging import Staging

MIB = 1 << 20


@given(st.lists(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=40), max_size=8), st.integers(2, 8))
def test_every_stored_value_is_written_once_and_no_share_is_much_above_the_others(sizes: list[list[int]], count: int):
    leaves = {f"leaf {i}": {str(k): size for k, size in enumerate(values)} for i, values in enumerate(sizes)}
    jobs = [Job((name,), {}, sum(values.values())) for name, values in leaves.items()]
    shares = share(jobs, count, leaves.__getitem__)
    written = [
        (name, key) for own in shares.jobs for name, keys in values_of(own, leaves.__getitem__).items() for key in keys
    ]
    assert sorted(written) == sorted((name, key) for name, values in leaves.items() for key in values)
    loads = [sum(job.work_bytes for job in own) for own in shares.jobs]
    total = sum(loads)
    assert max(loads) <= total / count + max(total / count / 8, MIB) + max(map(max, sizes), default=0)
    assert shares == share(jobs, count, leaves.__getitem__)


def test_pieces_of_a_job_stay_together_and_in_order():
    """So that what they read in common is decoded once, from front to back."""
    sizes = {str(k): MIB for k in range(40)}
    shares = share([Job(("a", "b"), {}, 80 * MIB)], 2, lambda name: sizes)
    for (job,) in shares.jobs:
        assert set(job.names) == set(job.only) == {"a", "b"}
        assert all(list(keys) == sorted(keys, key=int) for keys in job.only.values())


@dataclass
class Shelf:
    """A key-value store in memory; it can stop to answer, or refuse."""

    values: dict[str, str] = field(default_factory=dict)
    answers: threading.Event = field(default_factory=threading.Event)
    refusal: str | None = None

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.answers.wait(5)
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        for name, _ in self.key_value_dir_get(key):
            del self.values[name]


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf()
    shelf.answers.set()
    return shelf


@pytest.fixture
def three(shelf: Shelf) -> Iterator[list[Processes]]:
    made = [Processes(i, 3, shelf) for i in range(3)]
    with ExitStack() as stack:
        for process in made:
            process.start()
            stack.callback(process.stop)
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_SECONDS", "ARRIVAL_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(talking, name, 0.4)
    monkeypatch.setattr(talking, "_EXCHANGE_SECONDS", 0.02)
    monkeypatch.setattr(talking, "_PARTING_SECONDS", 0.0)


def until_raised(call: Callable[[], object]) -> ok.OrbaxkitError:
    """The error of a call that is repeated until it raises."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            call()
        except ok.OrbaxkitError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def test_what_is_told_is_heard(three: list[Processes]):
    three[1].tell("place", ["a", 1])
    three[2].tell("place", None)
    assert three[0].wait("place") == {1: ["a", 1], 2: None}
    assert three[2].wait("place", [1]) == {1: ["a", 1]}


def test_a_failure_keeps_its_class_and_its_origin(three: list[Processes]):
    own = ok.TargetError("no such leaf", where="here")
    failing = threading.Thread(target=three[1].fail, args=(own,))
    failing.start()
    heard = until_raised(lambda: three[2].alive(0))
    relaying = threading.Thread(target=three[2].fail, args=(heard,))
    relaying.start()
    relayed = until_raised(lambda: three[0].alive(0))
    three[0].fail(relayed)
    assert type(heard) is type(relayed) is ok.TargetError
    assert str(heard) == str(relayed) == "process 1 of 3 failed: no such leaf\nwhere: here"
    failing.join(5)
    relaying.join(5)
    assert not failing.is_alive()
    assert not relaying.is_alive()


def test_a_process_that_gives_no_sign_is_given_up(three: list[Processes], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(talking, "STALL_SECONDS", 60.0)
    for process in three[1:]:
        process.alive(0)
    error = until_raised(lambda: (three[0].alive(0), three[1].alive(0)))
    assert str(error) == "process 2 of 3 has shown no sign of life for 0.4 s"


def test_so_is_one_that_lives_and_gets_no_further(three: list[Processes]):
    moved = iter(range(1000))
    with three[2].busy():
        error = until_raised(lambda: (three[0].alive(0), three[1].alive(next(moved))))
    assert str(error) == "process 2 of 3 has got no further for 0.4 s"


def test_waiting_is_no_standing_still(three: list[Processes]):
    """However long the others take."""
    waiting = threading.Thread(target=three[1].wait, args=("done", [0]))
    waiting.start()
    moved = iter(range(1000))
    end = time.monotonic() + 1
    while time.monotonic() < end:
        three[0].alive(next(moved))
        three[2].alive(next(moved))
        time.sleep(0.01)
    three[0].tell("done")
    waiting.join(5)
    assert not waiting.is_alive()


def test_one_that_never_comes_is_given_up(shelf: Shelf):
    first = Processes(0, 2, shelf)
    first.start()
    error = until_raised(lambda: first.wait("anything"))
    first.stop()
    assert str(error) == "process 1 of 2 has not called convert within 0.4 s: all call it"


def test_a_store_that_does_not_answer_is_given_up(three: list[Processes], shelf: Shelf):
    shelf.answers.clear()
    error = until_raised(lambda: three[1].alive(0))
    shelf.answers.set()
    assert str(error) == "process 0 of 3, through which all talk, is lost: no answer within 0.4 s"


def test_a_store_that_refuses_too(three: list[Processes], shelf: Shelf):
    shelf.refusal = "UNAVAILABLE: connection reset\nand more"
    error = until_raised(lambda: three[1].wait("anything"))
    assert str(error) == "process 0 of 3, through which all talk, is lost: UNAVAILABLE: connection reset"


def test_processes_about_to_write_different_things_stop(three: list[Processes]):
    for process, digest in zip(three[1:], "ab", strict=True):
        process.tell("digest", digest)
    with pytest.raises(ok.OrbaxkitError, match="process 2 of 3 would write something else than process 0"):
        three[0].agree("a")


def test_little_is_left_in_the_store(three: list[Processes], shelf: Shelf):
    """What was said in one call goes when the next one is over."""
    for process in three:
        process.stop()
    for call in (1, 2):
        again = [Processes(i, 3, shelf, call) for i in range(3)]
        for process in again:
            process.start()
        finishing = [threading.Thread(target=process.finish) for process in again]
        for each in finishing:
            each.start()
        for each in finishing:
            each.join(5)
        for process in again:
            process.stop()
    assert sorted(shelf.values) == [f"orbaxkit/2/{i}" for i in range(3)]


def test_one_that_is_alone_neither_talks_nor_waits():
    with together() as alone:
        assert (alone.count, alone.is_first) == (1, True)
        assert alone.wait("anything") == {}
        alone.agree("a")
        alone.finish()


def test_a_folder_that_is_not_shared(tmp_path: Path):
    with pytest.raises(ok.CheckpointError, match=r"another process made is not seen from here\nwhere: .*/elsewhere"):
        Staging.join(str(tmp_path / "out"), str(tmp_path / "elsewhere"))


def test_who_comes_late_cannot_put_in_place_what_others_removed(tmp_path: Path):
    first = Staging.begin(str(tmp_path / "out"), needed_bytes=0)
    Staging.join(first.path, first.temporary).discard()
    with pytest.raises(ok.CheckpointError, match="it cannot be written"):
        first.commit()
    assert list(tmp_path.iterdir()) == []


def test_who_removes_late_removes_nothing_that_stands(tmp_path: Path):
    first = Staging.begin(str(tmp_path / "out"), needed_bytes=0)
    second = Staging.join(first.path, first.temporary)
    first.commit()
    second.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_single_process_does_not_import_jax_to_find_out(tmp_path: Path):
    import subprocess
    import sys

    ok.convert({"w": np.ones(3)}, tmp_path / "source")
    code = "import sys, orbaxkit as ok; ok.convert(*sys.argv[1:]); print(sorted({'jax', 'orbax'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
