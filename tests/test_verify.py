"""Verifying: damage is named leaf by leaf, checksums see what decoding cannot, and nothing else is reported."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cases import save

import orbaxkit as ok

RANDOM = np.random.default_rng(0)
TREE = {
    "big": RANDOM.standard_normal((64, 64), np.float32),
    "small": np.arange(60, dtype=np.int32),
    "half": np.asarray([1.0, 2.0], jnp.bfloat16),
    "step": 3,
    "name": "a",
    "none": None,
}
WHOLE = "whole: 5 leaves, 16.2 KiB decoded"
STORAGE = {"ocdbt": {}, "zarr3": {"use_zarr3": True}, "plain": {"use_ocdbt": False}}


@pytest.fixture(scope="module", params=STORAGE)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole") / "checkpoint", TREE, **STORAGE[request.param])


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def largest_file(path: Path) -> Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_whole_checkpoint_is_whole(whole: Path):
    found = ok.verify(whole, values=True)
    assert found
    assert found.problems == ()
    assert str(found).endswith(WHOLE)


def test_A4_a_data_file_cut_in_half_is_one_line_and_other_leaves_restore(copied: Path):
    file = largest_file(copied)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    found = ok.verify(copied)
    assert not found
    damaged = [line for line in str(found).split("\n") if line.startswith("  ")]
    assert len(damaged) == 1
    assert "big" in damaged[0]
    names = {name for name, _ in found.problems}
    assert names == {"big"}
    rest = ok.restore(copied, ok.drop("big"), as_numpy=True)
    assert np.array_equal(rest["small"], TREE["small"])
    with pytest.raises(ok.CheckpointError) as caught:
        ok.restore(copied, as_numpy=True)
    assert len(str(caught.value).split("\n")) <= 5


def test_A4_the_line_names_the_file_and_the_bytes_wanted_and_there(tmp_path: Path):
    path = save(tmp_path / "a", TREE)
    file = largest_file(path)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    ((name, problem),) = ok.verify(path).problems
    assert name == "big"
    assert str(file.relative_to(path)) in problem
    assert f"and has {size // 2:,} bytes" in problem
    assert "should reach byte" in problem


def test_a_file_that_is_gone_is_named(copied: Path):
    largest_file(copied).unlink()
    assert "big" in dict(ok.verify(copied).problems)


def test_a_value_that_does_not_decode_is_named(copied: Path):
    file = largest_file(copied)
    data = bytearray(file.read_bytes())
    data[:64] = bytes(64)
    file.write_bytes(data)
    found = ok.verify(copied)
    assert not found
    assert len(found.problems) >= 1


def test_a_flipped_bit_is_seen_only_by_checksums(tmp_path: Path):
    """Raw values have no checksum of their own: any bits are numbers."""
    tree = {"w": np.arange(1000.0), "v": np.ones(3)}
    path = save(tmp_path / "a", tree)
    raw = ok.convert(path, tmp_path / "raw.safetensors")
    written = ok.verify(raw, hash=True)
    assert written.hashes.startswith("checksums of 2 leaves written to ")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a",
        "raw.safetensors",
        "raw.safetensors.orbaxkit-hashes.json",
    ]
    assert ok.verify(raw)
    data = bytearray(raw.read_bytes())
    data[-500] ^= 1
    raw.write_bytes(data)
    found = ok.verify(raw)
    assert found.problems == (("w", "its bytes changed since the checksums were written"),)
    (tmp_path / "raw.safetensors.orbaxkit-hashes.json").unlink()
    assert ok.verify(raw)


def test_checksums_are_of_the_values_not_of_their_storage(tmp_path: Path):
    a, b = save(tmp_path / "a", TREE), save(tmp_path / "b", TREE, use_zarr3=True)
    ok.verify(a, hash=True)
    shutil.copy(tmp_path / "a.orbaxkit-hashes.json", tmp_path / "b.orbaxkit-hashes.json")
    assert ok.verify(b).hashes.startswith("checked against 5 checksums")


def test_leaves_that_came_went_or_changed_shape_since_the_checksums(tmp_path: Path):
    save(tmp_path / "a", {"w": np.ones(2), "gone": np.ones(2), "same": np.ones(2)})
    ok.verify(tmp_path / "a", hash=True)
    shutil.rmtree(tmp_path / "a")
    save(tmp_path / "a", {"w": np.ones((2, 1)), "new": np.ones(2), "same": np.ones(2)})
    assert dict(ok.verify(tmp_path / "a").problems) == {
        "gone": "is gone: it has a checksum, and is not here",
        "new": "is not in a.orbaxkit-hashes.json",
        "w": "its shape changed",
    }


def test_no_checksums_of_a_damaged_checkpoint(copied: Path):
    os.truncate(largest_file(copied), 100)
    found = ok.verify(copied, hash=True)
    assert found.hashes == "no checksums were written: the checkpoint is damaged"
    assert not list(copied.parent.glob("*hashes*"))


def test_a_manifest_that_is_none_is_an_error(tmp_path: Path):
    save(tmp_path / "a", TREE)
    (tmp_path / "a.orbaxkit-hashes.json").write_text(json.dumps({"leaves": [1]}))
    with pytest.raises(ok.CheckpointError, match="these are no checksums of ours"):
        ok.verify(tmp_path / "a")


def test_values_finds_nan_infinities_and_constants(tmp_path: Path):
    tree = {
        "nan": np.asarray([1, np.nan, np.nan], np.float32),
        "inf": np.asarray([1, np.inf, -np.inf], jnp.bfloat16),
        "zeros": np.zeros((2, 2)),
        "good": np.arange(3),
        "one": np.ones(1),
    }
    path = save(tmp_path / "a", tree)
    assert ok.verify(path).problems == ()
    found = ok.verify(path, values=True)
    assert dict(found.problems) == {"inf": "2 infinite", "nan": "2 NaN"}
    assert dict(found.values or ()) == {"zeros": "all 4 elements are 0.0"}
    assert "values worth a look\n  zeros  all 4 elements are 0.0" in str(found)


def test_a_git_lfs_pointer_is_named(tmp_path: Path):
    path = save(tmp_path / "a", TREE, use_ocdbt=False)
    file = path / "big" / "0.0"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    problems = dict(ok.verify(path).problems)
    assert "is a Git LFS pointer, not the data (fetch the real files: git lfs pull)" in problems["big"]


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("_sharding", "without it Orbax restores jax arrays only into a target that names shardings"),
        ("array_metadatas", "without it typed PRNG keys come back as plain uint32 arrays"),
    ],
)
def test_a_missing_optional_file_is_a_note_that_says_what_it_costs(tmp_path: Path, name: str, cost: str):
    path = save(tmp_path / "a", {"w": jnp.ones(3), "key": jax.random.key(0)})
    gone = path / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.warns(ok.CheckpointWarning) if name == "array_metadatas" else _nothing():
        found = ok.verify(path)
    assert found
    assert f"{name} is missing: {cost}" in found.notes


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_an_unfinished_save_is_told(tmp_path: Path):
    path = save(tmp_path / "x.orbax-checkpoint-tmp-17", TREE)
    with pytest.warns(ok.CheckpointWarning, match="never finished"):
        found = ok.verify(path)
    assert any("never finished" in note for note in found.notes)


def test_a_run_is_verified_at_its_latest_step_and_its_checksums_lie_beside_that(tmp_path: Path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.PyTreeSave({"w": jnp.full(3, float(step))}))
    ok.verify(tmp_path / "run", hash=True)
    assert (tmp_path / "run" / "2.orbaxkit-hashes.json").exists()
    assert ok.verify(tmp_path / "run" / "2").hashes.startswith("checked against 1 checksum ")
    assert ok.verify(tmp_path / "run", step=1).hashes == ""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [1, 2]


def test_large_values_are_decoded_in_parts_and_damage_in_their_middle_is_found(tmp_path: Path):
    w = RANDOM.standard_normal((9_000, 2_000), np.float32)
    path = save(tmp_path / "a", {"w": w, "v": np.arange(3)})
    assert ok.verify(path, hash=True)
    file = largest_file(path)
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(os.urandom(4096))
    ((name, problem),) = ok.verify(path).problems
    assert name == "w"
    assert "damaged" in problem or "changed" in problem
