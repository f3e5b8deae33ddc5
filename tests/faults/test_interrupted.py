"""Conversions that are killed, interrupted or run out of disk: never a finished-looking destination."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cases import save

import orbaxkit as ok

# How many random moments are tried with each format in one run of the tests; ORBAXKIT_KILL_ROUNDS=100 tries as many.
ROUNDS = int(os.environ.get("ORBAXKIT_KILL_ROUNDS", "10"))

TREE = {f"w{i}": np.random.default_rng(i).standard_normal((512, 512), np.float32) for i in range(24)}

# Ready once it converted a leaf elsewhere: the moments are those of a conversion, not of imports.
CONVERT = """
import sys, tempfile
import orbaxkit as ok
with tempfile.TemporaryDirectory() as place:
    ok.convert(sys.argv[1], place + "/warm", ok.select("w0"), ok.cast("float16"), format=sys.argv[3])
print("ready", flush=True)
ok.convert(sys.argv[1], sys.argv[2], ok.cast("float16", "w*") , overwrite="overwrite" in sys.argv, format=sys.argv[3])
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / "in", TREE)


def digest(path: Path) -> str:
    """Of every file's name and bytes."""
    out = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            out.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return out.hexdigest()


def start(*args: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(ok.__file__).parent.parent)}
    command = [sys.executable, "-c", CONVERT, *map(str, args)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.fixture(scope="module")
def seconds(source: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long an undisturbed conversion takes, from the moment that its process is ready."""
    child = start(source, tmp_path_factory.mktemp("timed") / "out", "orbax")
    assert child.stdout is not None
    begun = time.perf_counter()
    assert child.stdout.readline() == "done\n"
    taken = time.perf_counter() - begun
    child.communicate()
    return taken


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_killed_at_any_moment_there_is_no_destination_or_a_whole_one(
    source: Path, tmp_path: Path, seconds: float, round_: int, format: str
):
    before = digest(source)
    destination = tmp_path / "out"
    child = start(source, destination, format)
    time.sleep(random.Random(f"{round_} {format}").uniform(0, seconds))
    child.kill()
    child.communicate()
    if destination.exists():
        assert ok.verify(destination)
        assert not ok.diff(source, destination, ok.cast("float16", "w*"), values=True)
    left = [path.name for path in tmp_path.iterdir() if path != destination]
    assert all(name.startswith("out.orbaxkit-tmp-") for name in left)
    assert digest(source) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ok.CheckpointWarning)
        ok.convert(source, destination, ok.cast("float16", "w*"), format=format, overwrite=destination.exists())
    assert all(any(name in str(warning.message) for warning in caught) for name in left)
    assert not ok.diff(source, destination, ok.cast("float16", "w*"), values=True)


@pytest.mark.parametrize("round_", range(max(1, ROUNDS // 3)))
def test_killed_while_overwriting_the_old_or_the_new_one_can_be_had(
    source: Path, tmp_path: Path, seconds: float, round_: int
):
    destination = save(tmp_path / "out", {"old": np.ones(3)})
    child = start(source, destination, "orbax", "overwrite")
    time.sleep(random.Random(round_).uniform(seconds / 2, seconds))
    child.kill()
    child.communicate()
    found = [path for path in tmp_path.iterdir() if path.name == "out" or ".orbaxkit-old-" in path.name]
    assert any(is_whole(path) for path in found)


def is_whole(path: Path) -> bool:
    """An old one that was being deleted is told from a whole one by its warning or error."""
    try:
        return set(ok.open(path).specs) in ({"old"}, set(TREE))
    except (ok.CheckpointWarning, ok.CheckpointError):
        return False


def test_a_leftover_is_named_by_the_next_run_and_taken_for_no_checkpoint(source: Path, tmp_path: Path):
    (tmp_path / "out.orbaxkit-tmp-abcdefgh").mkdir()
    with pytest.warns(ok.CheckpointWarning, match="an interrupted run left .*out.orbaxkit-tmp-abcdefgh"):
        ok.convert(source, tmp_path / "out", ok.select("w0"))
    assert set(ok.open(tmp_path / "out").specs) == {"w0"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_commands_clean_up(source: Path, tmp_path: Path, seconds: float, number: int, code: int):
    env = os.environ | {"PYTHONPATH": str(Path(ok.__file__).parent.parent)}
    command = [sys.executable, "-m", "orbaxkit", "convert", str(source), str(tmp_path / "out"), "--cast", "float16"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    while not list(tmp_path.iterdir()) and child.poll() is None:
        time.sleep(0.005)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    if child.returncode == 0:
        pytest.skip("the conversion was faster than the signal")
    assert child.returncode == code
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: a full disk; a small tmpfs cannot be mounted here ({done.stderr.strip()})")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_too_little_disk_is_told_before_anything_is_written(source: Path, tiny_disk: Path, format: str):
    with pytest.raises(ok.CheckpointError, match=r"bytes are to be written, .* bytes of disk are free"):
        ok.convert(source, tiny_disk / "out", format=format)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_disk_that_fills_up_meanwhile_is_one_error_and_leaves_nothing(source: Path, tiny_disk: Path, format: str):
    """Someone else takes the room once the check has passed."""
    rest = tiny_disk / "rest"

    def fill(done: int, total: int) -> None:
        if not rest.exists():
            with open(rest, "wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()

    with pytest.raises(ok.CheckpointError, match="the disk is full") as caught:
        ok.convert(source, tiny_disk / "out", ok.select("w0", "w1", "w2"), format=format, progress=fill)
    assert str(caught.value).split("\n") == [
        "the disk is full",
        f"where: {tiny_disk}/out",
        "hint: what was written is removed",
    ]
    assert [path.name for path in tiny_disk.iterdir()] == ["rest"]
