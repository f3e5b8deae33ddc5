"""What is damaged, hostile or no checkpoint at all: one short error each, naming the file and the leaf."""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from formats.golden_cases import GOLDEN, copy_golden, entry, read_leaf, write_array, write_metadata, write_tree

from orbaxkit._checkpoint import open_checkpoint
from orbaxkit.errors import CheckpointError, OrbaxkitError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"


def _read_damaged(path: Path) -> None:
    source = open_checkpoint(path).source
    for name, _ in source.problems(source.specs):
        read_leaf(source, name)


def error_of(path: Path) -> str:
    """The error of opening, or of reading the leaves that have problems; never any other exception."""
    with pytest.raises(CheckpointError) as caught:
        _read_damaged(path)
    text = str(caught.value)
    assert len(text) < 1200
    assert text.count("\n") < 9
    assert caught.value.__cause__ is None
    return text


def test_what_is_no_checkpoint(tmp_path):
    assert "no such file or folder" in error_of(tmp_path / "none")
    assert "the folder is empty" in error_of(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "no _METADATA, no checkpoint file, no manifest.ocdbt" in error_of(tmp_path)
    assert "begins like no format that is known here" in error_of(tmp_path / "notes.txt")
    (tmp_path / "empty").touch()
    assert "it is empty" in error_of(tmp_path / "empty")
    (tmp_path / "lfs").write_bytes(LFS)
    assert "Git LFS pointer" in error_of(tmp_path / "lfs")


@pytest.mark.parametrize(
    ("name", "kind"), [("model.safetensors", "safetensors"), ("model.ckpt.index", "TensorFlow"), ("a.pt", "PyTorch")]
)
def test_other_formats_are_named(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"abcdefgh")
    assert kind in error_of(tmp_path / name)
    assert kind in error_of(tmp_path)


@pytest.mark.parametrize("path", ["", "a\0b", "gs://bucket/x", "s3://bucket/x"])
def test_paths_that_cannot_be_opened(path):
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_path_that_was_never_finished_is_named(tmp_path):
    write_tree(tmp_path / "x.orbax-checkpoint-tmp-1", {("w",): np.ones(1)})
    assert f"full name: {tmp_path}/x.orbax-checkpoint-tmp-1" in error_of(tmp_path / "x")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "_METADATA is empty"),
        (LFS, "_METADATA is a Git LFS pointer"),
        (b'{"tree_metadata": {"a', "_METADATA is not valid JSON"),
        (b"\xff\xfe", "_METADATA is not valid JSON"),
        (b"[" * 200_000, "_METADATA is nested too deeply"),
        (b"[]", "holds no tree_metadata"),
        (b'{"tree_metadata": []}', "holds no tree_metadata"),
        (b'{"tree_metadata": {"a": 1}}', "malformed entry"),
        (b'{"tree_metadata": {"a": {"key_metadata": [{"key": 1.5}]}}}', "malformed entry"),
        (b'{"tree_metadata": {"a": {}, "a": {}}}', "the key 'a' comes twice"),
        (b'{"tree_metadata": ' + b"9" * 10_000 + b"}", "_METADATA is not valid JSON"),
    ],
    ids=["empty", "lfs", "cut", "utf8", "deep", "list", "no_tree", "entry", "key", "twice", "number"],
)
def test_broken_metadata(tmp_path, data, problem):
    item = copy_golden("0.12.8/g_sharded_noocdbt", tmp_path)
    (item / "_METADATA").write_bytes(data)
    assert problem in error_of(item)
    assert str(item / "_METADATA") in error_of(item)


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "_METADATA").mkdir()
    assert "_METADATA is a directory where a file was expected" in error_of(tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "_METADATA")
    assert "no regular file" in error_of(tmp_path)
    with socket.socket(socket.AF_UNIX) as opened:
        (tmp_path / "x").mkdir()
        opened.bind(str(tmp_path / "x" / "checkpoint"))
        assert error_of(tmp_path / "x")


@pytest.mark.parametrize("key", ["..", "../../etc", "/etc", "a/../../b", "a/.."])
def test_names_that_lead_out_of_the_checkpoint(tmp_path, key):
    write_tree(tmp_path / "x", {("w",): np.ones(1)})
    write_metadata(tmp_path / "x", entry(["w"]), entry([key]))
    assert "a stored name leads out of the checkpoint" in error_of(tmp_path / "x")
    assert key in error_of(tmp_path / "x")


def test_names_with_nul(tmp_path):
    write_metadata(tmp_path, entry(["a\0b"]))
    assert "malformed entry" in error_of(tmp_path)


@pytest.mark.parametrize("name", ["x/../../../secret", "../secret"])
def test_placeholders_that_lead_out_of_the_checkpoint(tmp_path, name):
    msgpack = pytest.importorskip("msgpack")
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({"a": f"PLACEHOLDER://{name}"}))
    assert "a stored name leads out of the checkpoint" in error_of(tmp_path)


def test_a_terabyte_claimed_in_a_few_bytes_is_only_metadata(tmp_path):
    write_array(tmp_path, "w", np.ones(1, np.float32), shape=[1 << 38], chunks=[1])
    write_metadata(tmp_path, entry(["w"]))
    source = open_checkpoint(tmp_path).source
    assert source.specs["w"].nbytes == 1 << 40
    assert source.problems(["w"]) == [("w", "chunk 1 of 'w' is missing")]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shape": [-1]}, "shape is not a list of sizes"),
        ({"shape": [1 << 64]}, "shape is not a list of sizes"),
        ({"shape": [1.5]}, "shape is not a list of sizes"),
        ({"shape": [1] * 40}, "shape is not a list of sizes"),
        ({"chunks": [0]}, "has chunks (0,) for shape (1,)"),
        ({"chunks": [1, 1]}, "has chunks (1, 1) for shape (1,)"),
        ({"dtype": "|O"}, "names an unknown dtype: |O"),
        ({"dtype": [["a", "<f4"]]}, "names an unknown dtype"),
        ({"dtype": "x" * 5000}, "names an unknown dtype"),
        ({"dimension_separator": ".."}, "dimension separator"),
    ],
)
def test_broken_zarr_metadata_names_the_array(tmp_path, changes, problem):
    write_array(tmp_path, "w", np.ones(1, np.float32), **changes)
    write_metadata(tmp_path, entry(["w"]))
    assert problem in error_of(tmp_path)
    assert f"{tmp_path}/w" in error_of(tmp_path)


@pytest.mark.parametrize("data", [b"", LFS, b"{", b"{}", b"[]", b'{"zarr_format": 3, "node_type": "group"}'])
@pytest.mark.parametrize("name", [".zarray", "zarr.json"])
def test_zarr_metadata_that_is_no_such_thing(tmp_path, name, data):
    write_metadata(tmp_path, entry(["w"]))
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / name).write_bytes(data)
    assert name in error_of(tmp_path)


def test_a_leaf_without_data_does_not_stop_the_others(tmp_path):
    write_tree(tmp_path, {("a",): np.ones(2), ("b",): np.ones(2)})
    shutil.rmtree(tmp_path / "b")
    ckpt = open_checkpoint(tmp_path)
    assert (read_leaf(ckpt.source, "a") == 1).all()
    assert ckpt.source.problems(["a", "b"]) == [("b", "nothing is stored under its name 'b'")]
    assert "1 leaves have no data: b" in ckpt.notes


def test_a_description_without_any_data(tmp_path):
    item = copy_golden("0.12.8/c_top_leaf", tmp_path)
    for name in ("d", "ocdbt.process_0"):
        shutil.rmtree(item / name)
    (item / "manifest.ocdbt").unlink()
    assert "only the description of the tree is here" in error_of(item)


@pytest.mark.parametrize("data", [b"", b"\1\2\3", LFS], ids=["empty", "short", "lfs"])
@pytest.mark.parametrize("name", ["0.0", "1.1"])
def test_damaged_chunks_are_found_without_reading(tmp_path, name, data):
    write_array(tmp_path, "w", np.ones((2, 2)), chunks=[1, 1])
    for key in ("0.0", "0.1", "1.0", "1.1"):
        (tmp_path / "w" / key).write_bytes(b"\0" * 8)
    write_metadata(tmp_path, entry(["w"]))
    (tmp_path / "w" / name).write_bytes(data)
    ((leaf, problem),) = open_checkpoint(tmp_path).source.problems(["w"])
    assert leaf == "w"
    assert name in problem
    assert "w: " in error_of(tmp_path)


def test_A19_chunks_of_other_leaves_are_not_needed(tmp_path):
    write_tree(tmp_path, {("params", "w"): np.ones(4), ("mu", "w"): np.ones(4)})
    (tmp_path / "mu.w" / "0").unlink()
    source = open_checkpoint(tmp_path).source
    assert (read_leaf(source, "params/w") == 1).all()
    assert source.problems(source.specs) == [("mu/w", "chunk 0 of 'mu.w' is missing")]


# OCDBT


def biggest_file(item: Path) -> Path:
    return max((path for path in item.rglob("d/*")), key=lambda path: path.stat().st_size)


def test_A4_a_data_file_cut_in_half_touches_only_its_leaves(tmp_path):
    item = copy_golden("0.12.8/x_ocdbt_target_file_size", tmp_path)
    file = biggest_file(item)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    source = open_checkpoint(item).source
    problems = dict(source.problems(source.specs))
    assert 0 < len(problems) < len(source.specs)
    for name in source.specs:
        if name not in problems:
            read_leaf(source, name)
    for name, problem in problems.items():
        assert f"{file.name} is cut short: it should reach byte" in problem
        assert f"and has {size // 2:,} bytes" in problem
        with pytest.raises(CheckpointError, match=f"{name}: its data file"):
            read_leaf(source, name)


@pytest.mark.parametrize("data", [None, b"", LFS], ids=["missing", "empty", "lfs"])
def test_a_data_file_that_is_gone_is_never_zeros(tmp_path, data):
    item = copy_golden("0.12.8/x_ocdbt_target_file_size", tmp_path)
    file = biggest_file(item)
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    assert file.name in error_of(item)
    assert {None: "is missing", b"": "is cut short", LFS: "Git LFS"}[data] in error_of(item)


def test_damaged_bytes_are_an_error_of_the_leaf(tmp_path):
    item = copy_golden("0.12.8/x_ocdbt_target_file_size", tmp_path)
    for file in item.glob("ocdbt.process_0/d/*"):
        file.write_bytes(b"\0" * file.stat().st_size)
    source = open_checkpoint(item).source
    with pytest.raises(CheckpointError, match="a leaf cannot be read") as caught:
        read_leaf(source, "w0")
    assert caught.value.leaves[0][0] == "w0"
    assert str(caught.value).count("\n") <= 3


@pytest.mark.parametrize("size", [0, 3, 20])
def test_a_truncated_manifest(tmp_path, size):
    item = copy_golden("0.12.8/g_sharded_zarr3", tmp_path)
    os.truncate(item / "manifest.ocdbt", size)
    assert "manifest.ocdbt" in error_of(item)


@pytest.mark.parametrize("data", [LFS, b"\x76" * 200])
def test_a_manifest_that_is_none(tmp_path, data):
    item = copy_golden("0.12.8/g_sharded_zarr3", tmp_path)
    (item / "manifest.ocdbt").write_bytes(data)
    assert "manifest.ocdbt is" in error_of(item)


def test_a_flipped_byte_in_the_manifest(tmp_path):
    item = copy_golden("0.12.8/g_sharded_zarr3", tmp_path)
    data = bytearray((item / "manifest.ocdbt").read_bytes())
    data[40] ^= 1
    (item / "manifest.ocdbt").write_bytes(data)
    assert "manifest.ocdbt cannot be read" in error_of(item)


def test_only_the_manifest_was_uploaded(tmp_path):
    item = copy_golden("0.12.8/g_sharded_zarr3", tmp_path)
    shutil.rmtree(item / "d")
    assert "is missing" in error_of(item)
    assert "the whole folder is needed" in error_of(item)


def test_process_folders_are_missing(tmp_path):
    item = copy_golden("0.12.8/x_ocdbt_target_file_size", tmp_path)
    shutil.rmtree(item / "ocdbt.process_0")
    assert "ocdbt.process_0/d/" in error_of(item)
    assert "is missing" in error_of(item)


# Steps and items


def test_a_step_without_trees_says_what_is_there(tmp_path):
    (tmp_path / "5" / "config").mkdir(parents=True)
    (tmp_path / "5" / "config" / "metadata").write_text("{}")
    ckpt = open_checkpoint(tmp_path)
    assert (ckpt.step, list(ckpt.items)) == (5, [])
    with pytest.raises(CheckpointError, match=r"no tree is here[\s\S]*config"):
        assert ckpt.specs
    with pytest.raises(CheckpointError, match="'config' is no tree"):
        open_checkpoint(tmp_path, item="config")


def test_a_step_asked_of_what_has_no_steps(tmp_path):
    write_tree(tmp_path / "x", {("w",): np.ones(1)})
    with pytest.raises(CheckpointError, match="no step 7: this is one checkpoint"):
        open_checkpoint(tmp_path / "x", step=7)
    write_tree(tmp_path / "3", {("w",): np.ones(1)})
    assert open_checkpoint(tmp_path / "3", step=3).step == 3
    with pytest.raises(CheckpointError, match=r"no step 7[\s\S]*steps here: 3"):
        open_checkpoint(tmp_path / "3", step=7)


def test_a_tree_that_is_nested_too_deeply(tmp_path):
    write_tree(tmp_path, {("w",): np.ones(1)})
    write_metadata(tmp_path, entry(["w"]), entry(["a"] * 5000, "None", skip_deserialize=True))
    assert "nested more than 200 levels deep" in error_of(tmp_path)


def test_leaves_inside_leaves(tmp_path):
    write_tree(tmp_path, {("a",): np.ones(1), ("a", "b"): np.ones(1)})
    assert "a leaf lies inside another" in error_of(tmp_path)


@pytest.mark.parametrize("depth", [50, 100_000])
def test_rich_types_that_are_nested_too_deeply(tmp_path, depth):
    write_tree(tmp_path, {("w",): np.ones(1)})
    tree = '{"a":' * depth + "{}" + "}" * depth
    write_metadata(tmp_path, entry(["w"]), value_metadata_tree=tree)
    if depth == 50:
        assert list(open_checkpoint(tmp_path).specs) == ["w"]
    else:
        assert "nested" in error_of(tmp_path)


def test_keys_with_escape_codes_are_shown_escaped(tmp_path):
    write_tree(tmp_path, {("w",): np.ones(1)})
    write_metadata(tmp_path, entry(["w"]), entry(["\x1b[31m<b>../x"]))
    assert "\x1b" not in error_of(tmp_path)


@pytest.mark.parametrize(
    "case", ["0.12.8/g_sharded_noocdbt", "0.12.8/x_rich_types", "0.2.7/c_key_slash", "0.4.8/c_str"]
)
def test_any_truncated_file_is_an_orbaxkit_error_or_no_error(tmp_path, case):
    (found,) = (GOLDEN / case).glob("ckpt*")
    for number, file in enumerate(sorted(path for path in found.rglob("*") if path.is_file())):
        copy = Path(shutil.copytree(found, tmp_path / str(number)))
        target = copy / file.relative_to(found)
        os.truncate(target, target.stat().st_size // 2)
        with contextlib.suppress(OrbaxkitError):
            source = open_checkpoint(copy).source
            for name, problem in source.problems(source.specs):
                assert problem, name
            for name in source.specs:
                read_leaf(source, name)


def test_json_numbers_and_types_in_sidecars(tmp_path):
    write_tree(tmp_path, {("w",): np.ones(1)})
    hostile = {"sharding_type": "NamedSharding", "shape": [-1], "axis_names": 5, "partition_spec": [7, {"a": 1}]}
    (tmp_path / "_sharding").write_text(json.dumps({"dw==": json.dumps(hostile), "????": "x", "a": 5}))
    (tmp_path / "array_metadatas").mkdir()
    (tmp_path / "array_metadatas" / "process_0").write_text(
        '{"array_metadatas": [{"array_metadata": {"param_name": 5}}]}'
    )
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.specs["w"].sharding is None
    assert any("array_metadatas is ignored" in note for note in ckpt.notes)
