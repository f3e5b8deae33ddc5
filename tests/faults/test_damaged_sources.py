"""Damaged sources: named before or while they are read, and nothing half-written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import save

import orbaxkit as ok

TREE = {f"w{i}": np.random.default_rng(i).standard_normal((64, 64), np.float32) for i in range(3)} | {"step": 3}
STORAGE: dict[str, dict[str, Any]] = {"zarr2": {}, "zarr3": {"use_zarr3": True}, "plain": {"use_ocdbt": False}}


@pytest.fixture(params=STORAGE)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "in", TREE, **STORAGE[request.param])


def data_files(path: Path) -> list[Path]:
    """The files that hold array bytes, the largest first."""
    files = [file for file in path.rglob("*") if file.is_file() and (file.parent.name == "d" or file.name[0] in "c0")]
    return sorted(files, key=lambda file: -file.stat().st_size)


def assert_refused(source: Path, tmp_path: Path, *transforms: Any, format: str = "orbax") -> ok.CheckpointError:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ok.CheckpointError) as caught:
        ok.convert(source, tmp_path / "out", *transforms, format=format)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return caught.value


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_cut_file_is_refused_by_leaf(source: Path, tmp_path: Path, format: str):
    os.truncate(data_files(source)[0], data_files(source)[0].stat().st_size // 3)
    error = assert_refused(source, tmp_path, format=format)
    assert {name for name, _ in error.leaves} <= set(TREE)
    assert error.leaves


def test_a_missing_file_is_refused_by_leaf(source: Path, tmp_path: Path):
    data_files(source)[0].unlink()
    error = assert_refused(source, tmp_path)
    assert {name for name, _ in error.leaves} & set(TREE) or "missing" in str(error)


def test_the_leaves_that_are_whole_can_still_be_converted(tmp_path: Path):
    source = save(tmp_path / "in", TREE, use_ocdbt=False)
    os.truncate(source / "w1" / "0.0", 100)
    assert_refused(source, tmp_path, ok.cast("float16", "w*"))
    written = ok.convert(source, tmp_path / "rest", ok.drop("w1"), ok.cast("float16", "w*"))
    assert not ok.diff(source, written, ok.drop("w1"), ok.cast("float16", "w*"), values=True)


def test_bytes_that_do_not_decode_are_refused_when_they_are_read(tmp_path: Path):
    source = save(tmp_path / "in", TREE, use_ocdbt=False)
    file = source / "w2" / "0.0"
    file.write_bytes(bytes(file.stat().st_size))
    error = assert_refused(source, tmp_path, ok.cast("float16", "w*"))
    assert [name for name, _ in error.leaves] == ["w2"]


def test_flipped_bits_are_found_with_a_manifest_and_carried_along_without(tmp_path: Path):
    """Bytes of values that are copied as they are are not looked at: what a copy says is what the source says."""
    source = ok.convert(TREE, tmp_path / "in.safetensors")
    ok.verify(source, hash=True)
    data = bytearray(source.read_bytes())
    data[-100] ^= 4
    source.write_bytes(data)
    copied = ok.convert(source, tmp_path / "out")
    assert not ok.diff(source, copied, values=True)
    assert [name for name, _ in ok.verify(source).problems] == ["w2"]


@pytest.mark.parametrize("policy", ["zarr2", "zarr3 that stores all chunks", "zarr3 that leaves zeros out"])
def test_a_missing_chunk_is_damage_or_zeros_as_the_writer_had_it(policy: str, tmp_path: Path):
    is_zarr3 = policy != "zarr2"
    source = save(tmp_path / "in", TREE, use_ocdbt=False, use_zarr3=is_zarr3)
    if policy.endswith("out"):
        metadata = json.loads((source / "_METADATA").read_text())
        metadata["store_array_data_equal_to_fill_value"] = False
        (source / "_METADATA").write_text(json.dumps(metadata))
    chunk = source / "w1" / ("c" if is_zarr3 else "0.0")
    shutil.rmtree(chunk) if chunk.is_dir() else chunk.unlink()
    if not policy.endswith("out"):
        error = assert_refused(source, tmp_path)
        assert [name for name, _ in error.leaves] == ["w1"]
        return
    written = ok.convert(source, tmp_path / "out")
    assert not ok.restore(written, as_numpy=True)["w1"].any()
    assert not ok.diff(source, written, values=True)


def test_a_source_that_changes_its_mind_about_its_size_is_refused(tmp_path: Path):
    """A `.zarray` that claims a terabyte costs neither memory nor disk."""
    source = save(tmp_path / "in", TREE, use_ocdbt=False)
    meta = json.loads((source / "w1" / ".zarray").read_text())
    meta["shape"] = meta["chunks"] = [1 << 20, 1 << 18]
    (source / "w1" / ".zarray").write_text(json.dumps(meta))
    assert_refused(source, tmp_path)
    assert_refused(source, tmp_path, ok.cast("float16", "w*"))
