"""`convert` in several processes: the same as in one, shared out by bytes; nothing is left of one that fails."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from processes.converting import SILENCE_SECONDS, convert_all, convert_two, fail_in_turn, first_dies, rules, tree
from processes.harness import Ended, run_processes

import orbaxkit as ok

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

_PIECE_BYTES = 1 << 20  # what is given to a process at once
_CHUNK_BYTES = 1 << 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources written by plain Orbax in small chunks; one of them with a chunk that does not decode."""
    out = tmp_path_factory.mktemp("processes")
    random = np.random.default_rng(0)
    state = {
        "layers": {"w": jnp.asarray(random.standard_normal((8, 256, 1024), np.float32)), "b": jnp.ones((8, 16))},
        "embed": jnp.asarray(random.standard_normal((1024, 1024), np.float32)),
        "key": jax.random.key(7),
        "list": [np.arange(5), None],
        "step": 3,
        "name": "a run",
    }
    for name in ("source", "damaged", "stands"):
        _save(out / name, state)
    _save(out / "zarr3", {"layers": state["layers"]}, use_zarr3=True)
    _damage(out / "damaged")
    with ocp.CheckpointManager(out / "run", item_names=("state", "extra")) as manager:
        items = {"state": ocp.args.StandardSave({"w": state["embed"]}), "extra": ocp.args.JsonSave({"a": 1})}
        manager.save(5, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return out


def _save(path: Path, state: Any, **options: Any) -> None:
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state, save_args=save_args))


def _damage(path: Path) -> None:
    stored = ok.open(path).source.stored("layers/w")
    value = next(iter(stored.values.values()))
    with open(path / value.file, "r+b") as file:
        file.seek(value.offset + value.length // 2)
        file.write(bytes(1000))


def outcomes(ended: list[Ended], name: str) -> list[tuple[str, str]]:
    """What a call came to in each process that returned."""
    return [one.value[name][:2] for one in ended if one.code == 0]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Ended]:
    return run_processes(2, convert_all, str(folder), timeout=90)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[Ended]:
    return run_processes(4, convert_two, str(folder), timeout=90)


def assert_equal(path: Path, other: Any) -> None:
    """Equal to another conversion, whole, and readable by both of Orbax's interfaces."""
    found = ok.diff(path, other, values=True)
    assert not found, str(found)
    assert ok.verify(path)
    theirs = ocp.PyTreeCheckpointer().restore(path)
    ours = ok.restore(path, as_numpy=True)
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    assert len(jax.tree.leaves(ocp.v1.load(path))) == len(jax.tree.leaves(ours))


@pytest.mark.parametrize("name", ["copied", "one leaf", "cast", "unstacked"])
def test_two_processes_write_what_one_writes(folder: Path, two: list[Ended], tmp_path: Path, name: str):
    path = folder / "together" / name
    assert outcomes(two, name) == [("ok", str(path))] * 2
    assert_equal(path, ok.convert(folder / "source", tmp_path / "one", *rules()[name]))


@pytest.mark.parametrize("name", ["copied", "cast"])
def test_so_do_four(folder: Path, four: list[Ended], tmp_path: Path, name: str):
    path = folder / "four" / name
    assert outcomes(four, name) == [("ok", str(path))] * 4
    assert_equal(path, ok.convert(folder / "source", tmp_path / "one", *rules()[name]))


def test_each_writes_its_share_of_the_bytes(folder: Path, two: list[Ended], four: list[Ended]):
    paths = [folder / "together" / name for name in ("copied", "one leaf", "cast", "unstacked")]
    for path in [*paths, folder / "four/copied", folder / "four/cast"]:
        sizes = [sum(file.stat().st_size for file in part.glob("d/*")) for part in path.glob("ocdbt.process_*")]
        assert len(sizes) == (4 if path.parent.name == "four" else 2)
        assert max(sizes) <= sum(sizes) / len(sizes) + _PIECE_BYTES + _CHUNK_BYTES, (path, sizes)


def test_nothing_is_left_beside(folder: Path, two: list[Ended], four: list[Ended]):
    assert not list(folder.glob("**/*.orbaxkit-*"))


def test_zarr_3_a_run_and_trees_in_memory_too(folder: Path, two: list[Ended], tmp_path: Path):
    assert_equal(folder / "together/zarr3", folder / "zarr3")
    assert_equal(folder / "together/memory", ok.convert(tree(), tmp_path / "one"))
    assert outcomes(two, "a run") == [("ok", str(folder / "together/a run/9"))] * 2
    assert not ok.diff(folder / "together/a run/9/default", folder / "run/5/state", values=True)
    assert json.loads((folder / "together/a run/9/extra/metadata").read_text()) == {"a": 1}


def test_overwriting(folder: Path, two: list[Ended]):
    assert outcomes(two, "overwritten") == [("ok", str(folder / "stands"))] * 2
    assert (folder / "stands/ocdbt.process_1").is_dir()
    assert_equal(folder / "stands", folder / "source")


REFUSED = {
    "exists": r"the destination exists\nwhere: .*copied",
    "safetensors": r"safetensors files are written by one process, and these are 2",
    "spread": r"lie partly on devices of other processes\n  w\nhint: Orbax saves them, .*Checkpointer\(\)\.save\(",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_all(folder: Path, two: list[Ended], name: str):
    for kind, text in outcomes(two, name):
        assert kind != "ok"
        assert_match(REFUSED[name], text)
    assert not (folder / "together/spread").exists()


def assert_match(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.fixture(scope="module")
def failed(folder: Path) -> Iterator[list[Ended]]:
    return run_processes(3, fail_in_turn, str(folder), timeout=90, may_fail=True)


FAILED = {
    "raises": r"^process 1 of 3 failed: RuntimeError: the disk is on fire$",
    "meets damage": r"(^process \d of 3 failed: )?.*\n?.*layers/w: ",
    "differs": r"would write something else than|^process 1 of 3",
    "lacks the source": r"^process 1 of 3 failed: no such file or folder\nwhere: .*nowhere",
    "hangs": r"^process 1 of 3 has shown no sign of life for 3 s$",
    "dies": r"^process 1 of 3 has shown no sign of life for 3 s$",
}


@pytest.mark.parametrize("name", FAILED)
def test_when_one_fails_all_others_stop_and_nothing_is_left(folder: Path, failed: list[Ended], name: str):
    assert [one.code for one in failed] == [0, 7, 0]
    for one in (failed[0], failed[2]):
        kind, text, seconds = one.value[name]
        assert kind != "ok"
        assert_match(FAILED[name], text)
        assert seconds < 3 * SILENCE_SECONDS
    assert not list((folder / "failing").glob(f"{name}*"))


def test_the_next_conversion_works(folder: Path, failed: list[Ended]):
    assert outcomes(failed, "works again") == [("ok", str(folder / "failing/works again"))] * 2
    assert_equal(folder / "failing/works again", folder / "source")


def test_without_the_first_process_jax_ends_the_others(folder: Path):
    """So its folder stays, under a name that says what it is."""
    ended = run_processes(2, first_dies, str(folder), timeout=60, may_fail=True)
    assert ended[0].code == 7
    assert ended[1].code != 0 or ended[1].value[0] != "ok"
    assert not (folder / "orphans/out").exists()
    with pytest.warns(ok.CheckpointWarning, match="an interrupted run left"):
        ok.convert(folder / "source", folder / "orphans/out")
