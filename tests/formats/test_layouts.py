"""Layouts beyond the golden ones: other releases, lost optional files, roots, tmp folders, what a path can point at."""

import base64
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from formats.golden_cases import (
    GOLDEN,
    copy_golden,
    entry,
    expected_leaves,
    read_leaf,
    read_tree,
    same_bits,
    walk,
    write_array,
    write_metadata,
    write_tree,
)

from orbaxkit._checkpoint import open_checkpoint
from orbaxkit.errors import CheckpointError, CheckpointWarning
from orbaxkit.formats.files import Folder
from orbaxkit.formats.ocdbt import read_index
from orbaxkit.specs import SavedSharding


def assert_as_saved(case: str, path: Path) -> None:
    tree = read_tree(open_checkpoint(path).source)
    for name, leaf in expected_leaves(case).items():
        if "sha256" in leaf:
            assert same_bits(walk(tree, leaf["path"]), leaf), name


def one_manifest_store(item: Path) -> None:
    """Copy an item's OCDBT store into one without per-process folders, as releases around 0.3.5 wrote it."""
    base = {"driver": "file", "path": f"{item}/"}
    old = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    values = {key: old.read(key).result().value for key in old.list().result()}
    for name in os.listdir(item):
        if name.startswith("ocdbt.process_") or name == "d":
            shutil.rmtree(item / name)
    (item / "manifest.ocdbt").unlink()
    new = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": 10}}).result()
    for key, value in values.items():
        new.write(key, value).result()


def test_one_manifest_without_process_folders(tmp_path):
    item = copy_golden("0.4.8/g_sharded_default", tmp_path)
    one_manifest_store(item)
    assert sorted(name for name in os.listdir(item) if "ocdbt" in name) == ["manifest.ocdbt"]
    assert_as_saved("0.4.8/g_sharded_default", item)


def test_metadata_with_tree_metadata_only_and_strings_beside_the_first(tmp_path):
    item = copy_golden("0.4.8/c_str", tmp_path)
    one_manifest_store(item)
    meta = json.loads((item / "_METADATA").read_text())
    (item / "_METADATA").write_text(json.dumps({"tree_metadata": meta["tree_metadata"]}))
    (item / "s").mkdir()
    (item / "_strings.json").rename(item / "s" / "_strings.json")
    source = open_checkpoint(item).source
    assert (source.value("s"), source.value("u")) == ("hello", "hé世")


def test_strings_of_a_msgpack_only_checkpoint(tmp_path):
    item = copy_golden("0.4.8/c_str", tmp_path)
    (item / "_METADATA").unlink()
    assert open_checkpoint(item).source.value("u") == "hé世"


@pytest.mark.parametrize("case", ["0.4.8/g_sharded_default", "0.12.8/g_sharded_noocdbt", "0.12.8/g_sharded_zarr3"])
def test_no_optional_file_is_needed(tmp_path, case):
    item = copy_golden(case, tmp_path)
    for name in ("_sharding", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (item / name).unlink(missing_ok=True)
    shutil.rmtree(item / "array_metadatas", ignore_errors=True)
    assert_as_saved(case, item)


@pytest.mark.parametrize("name", ["_sharding", "array_metadatas/process_0"])
@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_broken_optional_file_is_a_note(tmp_path, name, data):
    item = copy_golden("0.12.8/g_sharded_noocdbt", tmp_path)
    (item / name).write_bytes(data)
    ckpt = open_checkpoint(item)
    assert any(note.startswith(f"{name.split('/')[0]} is ignored") for note in ckpt.notes)
    assert_as_saved("0.12.8/g_sharded_noocdbt", item)


@pytest.mark.parametrize("device", ["cuda:0", "TPU_0(process=0,(0,0,0,0))"])
def test_A10_a_device_that_is_not_here_is_only_a_note(tmp_path, device):
    item = copy_golden("0.12.8/c_top_leaf", tmp_path)
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": device})
    (item / "_sharding").write_text(json.dumps({base64.b64encode(b"").decode(): text}))
    ckpt = open_checkpoint(item)
    assert ckpt.specs[""].sharding == SavedSharding(device=device)
    assert f"saved on {device}" in ckpt.notes
    assert_as_saved("0.12.8/c_top_leaf", item)


@pytest.mark.parametrize("case", ["0.12.8/g_sharded_noocdbt", "0.12.8/g_sharded_zarr3", "0.4.8/c_fp8"])
def test_A3_without_metadata_the_leaves_come_from_the_array_store(tmp_path, case):
    item = copy_golden(case, tmp_path)
    (item / "_METADATA").unlink()
    (item / "checkpoint").unlink(missing_ok=True)
    with pytest.warns(CheckpointWarning, match=r"no _METADATA.*names joined by '.' are ambiguous") as caught:
        source = open_checkpoint(item).source
    assert len(caught) == 1
    for name, leaf in expected_leaves(case).items():
        assert same_bits(walk(read_tree(source), leaf["path"]), leaf), name


def test_A3_a_name_inside_another_is_kept_whole(tmp_path):
    write_array(tmp_path, "a", np.ones(2))
    write_array(tmp_path, "a.b", np.ones(3))
    with pytest.warns(CheckpointWarning, match="ambiguous"):
        specs = open_checkpoint(tmp_path).specs
    assert specs.paths == {"a": ("a",), "a.b": ("a.b",)}


def test_A18_a_lost_key_type_is_a_warning(tmp_path):
    item = copy_golden("0.11.20/f_typed_keys", tmp_path)
    shutil.rmtree(item / "array_metadatas")
    with pytest.warns(CheckpointWarning, match="may be typed PRNG keys"):
        specs = open_checkpoint(item).specs
    assert (specs["k"].kind, specs["k"].shape) == ("array", (2,))


def test_A18_without_write_shapes_there_were_no_typed_keys(tmp_path):
    write_array(tmp_path, "k", np.zeros(2, np.uint32))
    write_metadata(tmp_path, entry(["k"], "jax.Array"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_checkpoint(tmp_path).specs["k"].shape == (2,)


def test_A6_one_stored_name_for_two_paths_still_opens(tmp_path):
    write_array(tmp_path, "a.b.c", np.arange(2.0))
    write_metadata(tmp_path, entry(["a.b", "c"]), entry(["a", "b.c"]))
    specs = open_checkpoint(tmp_path).specs
    assert specs.paths == {"a.b/c": ("a.b", "c"), "a/b.c": ("a", "b.c")}


def test_A16_numeric_keys_are_in_numeric_order(tmp_path):
    write_tree(tmp_path, {("layers", name): np.full(1, int(name)) for name in ("0", "1", "10", "2")})
    assert list(open_checkpoint(tmp_path).specs) == ["layers/0", "layers/1", "layers/2", "layers/10"]


def test_sequence_indices_are_ints_and_keys_are_text(tmp_path):
    write_tree(tmp_path, {("a", 0): np.ones(1), ("a", 1): np.ones(1), ("b", "0"): np.ones(1)})
    assert open_checkpoint(tmp_path).specs.paths == {"a/0": ("a", 0), "a/1": ("a", 1), "b/0": ("b", "0")}


@pytest.mark.parametrize("dtype", [">f4", "<i2", "|b1", ">i8", "<c8", "<f8", "|u1"])
def test_dtypes_and_byte_orders(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    write_tree(tmp_path, {("a",): array})
    source = open_checkpoint(tmp_path).source
    assert source.specs["a"].dtype == array.dtype.newbyteorder("=")
    assert (read_leaf(source, "a") == array).all()
    assert (read_leaf(source, "a", (slice(1, 2), slice(1, 3))) == array[1:, 1:]).all()


def test_fortran_order(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    write_array(tmp_path, "a", np.asfortranarray(array), order="F")
    (tmp_path / "a" / "0.0").write_bytes(array.tobytes("F"))
    write_metadata(tmp_path, entry(["a"]))
    assert (read_leaf(open_checkpoint(tmp_path).source, "a") == array).all()


def test_an_unmerged_store_is_the_union_of_its_parts(tmp_path):
    item = copy_golden("0.12.8/x_replica_separate_folder", tmp_path) / "state"
    (item / "manifest.ocdbt").unlink()
    shutil.rmtree(item / "d")
    ckpt = open_checkpoint(item)
    assert any("ocdbt.process_0, ocdbt.process_replica_0" in note for note in ckpt.notes)
    assert_as_saved("0.12.8/x_replica_separate_folder", item)


def test_one_part_alone_is_never_taken_for_the_whole(tmp_path):
    item = copy_golden("mp-0.12.8/j_kill", tmp_path)
    shutil.rmtree(item / "ocdbt.process_1")
    with pytest.warns(CheckpointWarning, match="never finished"):
        source = open_checkpoint(item).source
    problems = dict(source.problems(source.specs))
    assert "is missing" in problems["params/dm"]
    with pytest.raises(CheckpointError, match=r"params/dm: chunk .* is missing"):
        read_leaf(source, "params/dm")


def test_zeros_that_were_not_written_are_zeros_only_where_the_writer_left_them_out(tmp_path):
    item = copy_golden("0.8.0/c_constzero", tmp_path)
    assert_as_saved("0.8.0/c_constzero", item)
    for setting, is_damage in ((True, True), (False, False)):
        inside = tmp_path / str(setting)
        inside.mkdir()
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{inside}/z/"}}
        ts.open(spec, create=True, dtype=ts.float32, shape=[4]).result()
        write_metadata(inside, entry(["z"]), store_array_data_equal_to_fill_value=setting)
        source = open_checkpoint(inside).source
        assert bool(source.problems(["z"])) is is_damage
    assert (read_leaf(source, "z") == 0).all()


def test_a_tree_whose_only_key_is_checkpoint(tmp_path):
    write_tree(tmp_path / "x", {("checkpoint",): np.ones(2)})
    assert list(open_checkpoint(tmp_path / "x").specs) == [""]
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    (tmp_path / "x" / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handler}))
    assert list(open_checkpoint(tmp_path / "x").specs) == ["checkpoint"]


# What a path points at


@pytest.mark.parametrize("name", ["{}", "ckpt_{:08}", "step_{:06}", "{:012}", "checkpoint_{}"])
def test_step_names(tmp_path, name):
    for step in (9, 10):
        write_tree(tmp_path / name.format(step) / "default", {("w",): np.full(1, step)})
    ckpt = open_checkpoint(tmp_path)
    assert (ckpt.step, ckpt.steps, ckpt.layout.step_name) == (10, (9, 10), name.format(10))
    assert read_leaf(open_checkpoint(tmp_path, step=9).source, "w") == 9


def test_steps_that_are_bare_items(tmp_path):
    for step in (1, 2):
        write_tree(tmp_path / f"checkpoint_{step}", {("w",): np.full(1, step)})
    assert (open_checkpoint(tmp_path).step, open_checkpoint(tmp_path / "checkpoint_1").step) == (2, 1)


def test_items_that_end_in_numbers_are_no_steps(tmp_path):
    for name in ("params", "model_1"):
        write_tree(tmp_path / name, {("w",): np.ones(1)})
    assert set(open_checkpoint(tmp_path).items) == {"params", "model_1"}
    assert open_checkpoint(tmp_path).steps == ()


def test_A2_root_step_and_item_open_alike(tmp_path):
    write_tree(tmp_path / "3" / "state", {("w",): np.ones(1)})
    for inside in (".", "3", "3/state"):
        ckpt = open_checkpoint(tmp_path / inside)
        assert (list(ckpt.specs), list(ckpt.items), ckpt.step) == (["w"], ["state"], 3)


def test_A2_two_items_are_the_first_level_and_item_narrows(tmp_path):
    for item in ("params", "opt"):
        write_tree(tmp_path / "3" / item, {("w",): np.ones(1)})
    assert list(open_checkpoint(tmp_path).specs) == ["opt/w", "params/w"]
    narrowed = open_checkpoint(tmp_path, item="params")
    assert (list(narrowed.specs), list(narrowed.items)) == (["w"], ["params"])
    assert list(open_checkpoint(narrowed).specs) == ["w"]
    with pytest.raises(CheckpointError, match=r"'ema' is not here[\s\S]*items: opt, params"):
        open_checkpoint(tmp_path, item="ema")


@pytest.mark.parametrize("inside", ["d", "ocdbt.process_0", "ocdbt.process_0/d", "_METADATA", "array_metadatas"])
def test_A2_inside_an_item_names_the_item(tmp_path, inside):
    item = copy_golden("0.12.8/c_top_leaf", tmp_path)
    with pytest.raises(CheckpointError, match=rf"inside a checkpoint[\s\S]*open {item}$"):
        open_checkpoint(item / inside)


def test_A2_inside_a_plain_item_and_inside_a_key(tmp_path):
    write_tree(tmp_path / "x", {("w",): np.ones(1)})
    with pytest.raises(CheckpointError, match=rf"open {tmp_path}/x$"):
        open_checkpoint(tmp_path / "x" / "w")
    key = GOLDEN / "0.12.8/b_mgr_args_composite/ckpt/20/key"
    with pytest.raises(CheckpointError, match=rf"open {key}$"):
        open_checkpoint(key / "jax_random_key")


@pytest.mark.parametrize(
    "tail", [".orbax-checkpoint-tmp", ".orbax-checkpoint-tmp-17", ".orbax-checkpoint-tmp-1700000000000000"]
)
def test_A5_unfinished_saves_are_listed_and_never_latest(tmp_path, tail):
    for name in ("1", "2", f"3{tail}"):
        write_tree(tmp_path / name / "default", {("w",): np.ones(1)})
    ckpt = open_checkpoint(tmp_path)
    assert (ckpt.step, ckpt.steps, ckpt.unfinished, ckpt.is_finished) == (2, (1, 2), (f"3{tail}",), True)
    with pytest.raises(CheckpointError, match=r"no step 3[\s\S]*steps here: 2, 1"):
        open_checkpoint(tmp_path, step=3)
    with pytest.warns(CheckpointWarning, match="never finished"):
        looked = open_checkpoint(tmp_path / f"3{tail}")
    assert (looked.step, looked.is_finished, list(looked.specs)) == (3, False, ["w"])
    assert "never finished" in looked.notes[0]


def test_A5_nested_unfinished_items_have_their_finished_names(tmp_path):
    write_tree(tmp_path / "3.orbax-checkpoint-tmp" / "params.orbax-checkpoint-tmp-5", {("w",): np.ones(1)})
    with pytest.warns(CheckpointWarning):
        ckpt = open_checkpoint(tmp_path / "3.orbax-checkpoint-tmp")
    assert (list(ckpt.items), ckpt.is_finished) == (["params"], False)
    with pytest.raises(CheckpointError, match=r"no step here is finished[\s\S]*3\.orbax-checkpoint-tmp"):
        open_checkpoint(tmp_path)


def test_paths_of_every_kind(tmp_path, monkeypatch):
    item = write_tree(tmp_path / "run" / "x", {("w",): np.ones(1)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("run/x", "./run/x/", "~/run/x", f"file://{item}", item, f"{item}//", "run/../run/x"):
        assert open_checkpoint(path).path == str(item)


def test_a_link_in_a_circle_is_passed_over(tmp_path):
    write_tree(tmp_path / "x", {("w",): np.ones(1)})
    (tmp_path / "x" / "loop").symlink_to("loop")
    (tmp_path / "x" / "w" / "loop").symlink_to("loop")
    assert read_leaf(open_checkpoint(tmp_path / "x").source, "w") == 1


def test_symlinks_are_followed(tmp_path):
    write_tree(tmp_path / "x", {("w",): np.ones(1)})
    (tmp_path / "x" / "w" / "0").rename(tmp_path / "blob")
    (tmp_path / "x" / "w" / "0").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_leaf(open_checkpoint(tmp_path / "link").source, "w") == 1


def test_a_manager_is_asked_for_its_folder_and_latest_step(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
        manager.wait_until_finished()
        ckpt = open_checkpoint(manager)
        assert (ckpt.step, ckpt.steps) == (2, (1, 2))
        assert (read_leaf(open_checkpoint(manager, step=1).source, "w") == 1).all()


def test_the_index_of_a_deep_tree_has_every_key(tmp_path):
    config = {"max_decoded_node_bytes": 400}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    values = {f"a:b.layer{i % 4} {i:04d}%/0": b"x" * (30 if i % 2 else 300) for i in range(200)}
    for start in range(0, 200, 50):
        transaction = ts.Transaction(atomic=True)
        writing = store.with_transaction(transaction)
        for key in list(values)[start : start + 50]:
            writing[key] = values[key]
            writing[f"{key[:-2]}/.zarray"] = b"{}"
        transaction.commit_async().result()
    index = read_index(Folder(str(tmp_path)))
    found = {f"{name}/{key}": value for name in index.arrays for key, value in index.values(name).items()}
    assert {key: value.length for key, value in found.items()} == {k: len(v) for k, v in values.items()}
    place = found["a:b.layer0 0000%/0"]
    data = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.length]
    assert data == values["a:b.layer0 0000%/0"]
