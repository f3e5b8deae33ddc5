"""Damaged sources: named before or while they are read, and nothing half-written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from cases import save

import orbaxkit as ok

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

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


# Values that are copied as they are, undecoded.


def place_of(source: Path, name: str) -> tuple[Path, int, int]:
    """The file, offset and length of a leaf's one stored value."""
    found = ok.open(source).source.stored(name)
    (value,) = found.values.values()
    return Path(found.folder.where(value.file)), value.offset, value.length


def change(source: Path, name: str, at: int, bits: int = 0xFF) -> str:
    """Flip bits of one byte of a stored value, counted from its start or its end; the name of its file."""
    file, offset, length = place_of(source, name)
    data = bytearray(file.read_bytes())
    data[offset + (at if at >= 0 else length + at)] ^= bits
    file.write_bytes(data)
    return str(file.relative_to(source))


def cut_out(source: Path, name: str) -> str:
    """A stored value in a file of its own loses bytes in its middle; its end, where a shard has its index, stays."""
    file, _, _ = place_of(source, name)
    data = file.read_bytes()
    file.write_bytes(data[:2000] + data[2500:])
    return str(file.relative_to(source))


def in_small_chunks(path: Path, tree: dict[str, np.ndarray], *, keeps_zeros: bool = True) -> Path:
    """A zarr 3 item whose shards hold chunks of 16 rows and 32 columns each."""
    save(path, tree, use_ocdbt=False, use_zarr3=True)
    for name, array in tree.items():
        document = json.loads((path / name / "zarr.json").read_text())
        document["codecs"][0]["configuration"]["chunk_shape"] = [16, 32]
        document["chunk_grid"]["configuration"]["chunk_shape"] = [64, 64]
        shutil.rmtree(path / name / "c")
        (path / name / "zarr.json").write_text(json.dumps(document))
        spec = {"driver": "zarr3", "kvstore": f"file://{path}/{name}/", "store_data_equal_to_fill_value": keeps_zeros}
        ts.open(spec, open=True).result().write(array).result()
    return path


HEAD = [0, 1, 4, 5, 6]  # the magic number, and the frame header with the decoded size
COPIES = {"as it is": (), "renamed": (ok.rename({"w1": "a/w1"}),), "decoded": (ok.cast("float16", "w*"),)}


def assert_chunk_refused(source: Path, tmp_path: Path, name: str, file: str, how: str = "as it is") -> str:
    error = assert_refused(source, tmp_path, *COPIES[how])
    assert [leaf.rpartition("/")[2] for leaf, _ in error.leaves] == [name]
    assert file in str(error)
    return error.leaves[0][1]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("at", HEAD)
def test_a_flipped_byte_at_the_head_of_a_chunk_is_refused_by_leaf(source: Path, tmp_path: Path, at: int, how: str):
    assert_chunk_refused(source, tmp_path, "w1", change(source, "w1", at, 0x81), how)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("at", [-1, -4, -5, -12, -13, -20])
@pytest.mark.parametrize("storage", ["ocdbt", "plain", "small chunks"])
def test_a_flipped_byte_in_the_index_of_a_shard_is_refused_by_leaf(tmp_path: Path, storage: str, at: int, how: str):
    arrays = {name: array for name, array in TREE.items() if name != "step"}
    if storage == "small chunks":
        source = in_small_chunks(tmp_path / "in", arrays)
    else:
        source = save(tmp_path / "in", arrays, use_zarr3=True, use_ocdbt=storage == "ocdbt")
    problem = assert_chunk_refused(source, tmp_path, "w1", change(source, "w1", at, 1), how)
    assert "the index of its shard is damaged (CRC-32C)" in problem


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("storage", ["zarr2", "zarr3", "small chunks"])
def test_a_chunk_that_lost_bytes_in_its_middle_is_refused_by_leaf(tmp_path: Path, storage: str, how: str):
    arrays = {name: array for name, array in TREE.items() if name != "step"}
    if storage == "small chunks":
        source = in_small_chunks(tmp_path / "in", arrays)
    else:
        source = save(tmp_path / "in", arrays, use_zarr3=storage == "zarr3", use_ocdbt=False)
    assert_chunk_refused(source, tmp_path, "w1", cut_out(source, "w1"), how)


@pytest.mark.parametrize("chunk", range(8))
def test_any_damaged_chunk_of_a_shard_is_refused_by_leaf(tmp_path: Path, chunk: int):
    source = in_small_chunks(tmp_path / "in", {"w1": TREE["w1"]})
    file, offset, length = place_of(source, "w1")
    entry = file.read_bytes()[offset + length - 4 - 16 * (8 - chunk) :]
    problem = assert_chunk_refused(source, tmp_path, "w1", change(source, "w1", int.from_bytes(entry[:8], "little")))
    assert f"chunk {chunk} of its shard: not zstd, or damaged" in problem


@pytest.mark.parametrize("storage", ["one chunk", "small chunks"])
def test_whole_shards_are_copied_as_they_are(tmp_path: Path, storage: str):
    arrays = {"w1": TREE["w1"], "edge": np.random.default_rng(3).standard_normal((70, 33), np.float32)}
    if storage == "small chunks":
        source = in_small_chunks(tmp_path / "in", arrays)
    else:
        source = save(tmp_path / "in", arrays, use_zarr3=True, use_ocdbt=False)
    written = ok.convert(source, tmp_path / "out", ok.rename({"w1": "x"}))
    assert encoded_values(written, "x") == encoded_values(source, "w1")
    assert encoded_values(written, "edge") == encoded_values(source, "edge")
    assert not ok.diff(source, written, ok.rename({"w1": "x"}), values=True)
    found = ocp.PyTreeCheckpointer().restore(written)
    assert np.array_equal(found["edge"], arrays["edge"])


def encoded_values(path: Path, name: str) -> dict[str, bytes]:
    found = ok.open(path).source.stored(name)
    out = {}
    for key, value in found.values.items():
        with found.open(value) as file:
            out[key] = file if isinstance(file, bytes) else os.pread(file.fileno(), value.length, value.offset)
    return out


def test_a_shard_that_lacks_a_chunk_is_never_copied_as_it_is(tmp_path: Path):
    """Stock Orbax could not read the copy, which says that all chunks are stored."""
    array = TREE["w1"].copy()
    array[16:32, 32:] = 0
    source = in_small_chunks(tmp_path / "in", {"w1": array}, keeps_zeros=False)
    error = assert_refused(source, tmp_path)
    assert error.leaves == (("w1", "chunk c/0/0 in w1/c/0/0: it is missing in its shard"),)


def test_a_shard_that_lacks_a_chunk_holds_zeros_where_the_writer_leaves_them_out(tmp_path: Path):
    array = TREE["w1"].copy()
    array[16:32, 32:] = 0
    source = in_small_chunks(tmp_path / "in", {"w1": array}, keeps_zeros=False)
    metadata = json.loads((source / "_METADATA").read_text())
    metadata["store_array_data_equal_to_fill_value"] = False
    (source / "_METADATA").write_text(json.dumps(metadata))
    np.testing.assert_array_equal(ok.restore(source, as_numpy=True)["w1"], array)
    written = ok.convert(source, tmp_path / "out")
    np.testing.assert_array_equal(ok.restore(written, as_numpy=True)["w1"], array)
    assert json.loads((written / "_METADATA").read_text())["store_array_data_equal_to_fill_value"]
    np.testing.assert_array_equal(ocp.PyTreeCheckpointer().restore(written)["w1"], array)


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
