"""Checkpoints by many releases, read as they were saved: every value bit for bit, every spec."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from formats.golden_cases import CASES, GOLDEN, expected_leaves, read_leaf, read_tree, same_bits, walk

from orbaxkit._checkpoint import Checkpoint, open_checkpoint
from orbaxkit.errors import CheckpointWarning
from orbaxkit.specs import SavedSharding

# np.bool_ scalars were lost when these releases saved: they come back as None.
LOST = {("0.4.8/c_npscalar", "['nb']")}


def open_case(case: str, inside: str = "") -> Checkpoint:
    (found,) = (GOLDEN / case).glob("ckpt*")
    path = next(found.iterdir()) if case.endswith("interrupted_mgr") else found / inside
    with warnings.catch_warnings():
        if "-tmp" in str(path):
            warnings.simplefilter("ignore", CheckpointWarning)
        return open_checkpoint(path)


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_what_was_saved(case):
    source = open_case(case).source
    tree = read_tree(source)
    assert source.problems(source.specs) == []
    for name, leaf in expected_leaves(case).items():
        found = walk(tree, leaf["path"])
        if leaf.get("none") or (case, name) in LOST:
            assert found is None
        elif "value" in leaf:
            assert found == leaf["value"]
        elif "PRNGKey" not in leaf.get("pytype", ""):
            assert same_bits(found, leaf), name
            assert list(np.shape(found)) == leaf["shape"]
            assert np.asarray(found).dtype.name == leaf["dtype"]


@pytest.mark.parametrize("case", CASES)
def test_a_region_is_the_same_part_of_the_whole(case):
    source = open_case(case).source
    arrays = [name for name, spec in source.specs.leaves.items() if spec.kind in ("array", "numpy") and spec.size > 1]
    for name in arrays:
        whole = read_leaf(source, name)
        index = tuple(slice(size // 2, size) for size in whole.shape)
        assert read_leaf(source, name, index).tobytes() == np.ascontiguousarray(whole[index]).tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_stored_bytes_are_known_for_every_value(case):
    for name, spec in open_case(case).specs.leaves.items():
        assert spec.kind == "empty" or spec.stored_bytes is not None, name
        assert spec.kind == "empty" or not spec.size or spec.stored_bytes, name


def test_A1_shapes_are_global_and_parameters_counted_once():
    specs = open_case("0.12.8/g_sharded_zarr3").specs
    assert specs["rep"].shape == (16, 8)
    assert specs["dm"].shape == (16, 8)
    assert specs["dm"].parameters == 128


def test_A10_saved_sharding_is_plain_data_and_a_note():
    ckpt = open_case("0.12.8/g_sharded_noocdbt")
    assert ckpt.specs["dm"].sharding == SavedSharding(("data", "model"), (4, 2), ("data", "model"))
    assert ckpt.specs["both"].sharding == SavedSharding(("data", "model"), (4, 2), (("data", "model"),))
    assert "saved on a 4x2 mesh (data, model) of 8 devices" in ckpt.notes


@pytest.mark.parametrize("case", ["0.11.20/f_typed_keys", "0.12.8/f_typed_keys_noocdbt"])
def test_A18_typed_keys_have_their_implementation(case):
    specs = open_case(case).specs
    assert (specs["k"].kind, specs["k"].shape, specs["k"].data_shape) == ("key", (), (2,))
    assert (specs["ks"].shape, specs["ks"].data_shape) == ((4,), (4, 2))
    assert specs["k"].dtype_name == "key<fry>"
    assert "rbg" not in specs or specs["rbg"].dtype_name == "key<rbg>"


def test_one_key_and_one_array_are_items_of_one_leaf():
    ckpt = open_case("0.12.8/b_mgr_args_composite")
    assert set(ckpt.items) == {"arr", "key", "params", "state"}
    assert set(ckpt.layout.other_items) == {"metadata"}
    assert list(ckpt.items["arr"]) == [""]
    assert ckpt.specs["arr"].shape == (2, 3)
    assert ckpt.specs["key"].dtype_name == "key<fry>"
    assert ckpt.specs.paths["params/Dense_0/bias"] == ("params", "Dense_0", "bias")


def test_steps_of_a_root_and_its_metadata_folder():
    ckpt = open_case("0.5.23/b_mgr_args_composite")
    assert (ckpt.step, ckpt.steps) == (20, (10, 20))
    prefixed = open_case("0.5.23/b_mgr_prefix_rootmeta")
    assert (prefixed.step, prefixed.steps, prefixed.layout.step_name) == (3, (2, 3), "ckpt_00000003")


def test_strays_and_metrics_are_other_items():
    assert set(open_case("0.12.8/x_mgr_metrics").layout.other_items) == {"metrics"}
    ckpt = open_case("0.12.8/x_stray_files")
    assert set(ckpt.layout.other_items) == {"assets"}
    assert list(ckpt.items) == ["default"]


def test_rich_types_name_their_containers_and_import_nothing():
    containers = open_case("0.12.8/x_rich_types").specs.containers
    assert containers["opt"] == containers["t"] == "tuple"
    assert containers["opt/0"] == "optax._src.transform.ScaleByAdamState"
    assert containers["nt"] == "__main__.NT"


def test_kinds_as_recorded_and_where_nothing_was_recorded():
    specs = open_case("0.4.8/c_npscalar").specs
    assert {name: spec.kind for name, spec in specs.items()} == {
        "a": "array",
        "n32": "scalar",
        "n64": "scalar",
        "nb": "empty",
    }
    assert type(open_case("0.4.8/c_npscalar").source.value("n32")) is np.float32
    old = open_case("0.2.7/c_int")
    assert old.specs["i"].kind == "scalar"
    assert type(old.source.value("i")) is int


def test_values_inside_the_msgpack_file_are_not_empty():
    specs = open_case("0.4.8/a_flax_save_args").specs
    assert (specs["params/Dense_0/kernel"].kind, specs["step"].kind) == ("array", "scalar")
    assert specs["params/Dense_0/kernel"].stored_bytes == specs["params/Dense_0/kernel"].nbytes
    assert specs["opt_state/0"].empty == "None"


def test_shards_and_chunks():
    spec = open_case("0.12.8/g_sharded_zarr3").specs["dm"]
    assert (spec.shape, spec.shard_shape, spec.chunk_shape) == ((16, 8), (4, 4), (4, 4))
    assert open_case("0.12.8/g_sharded_noocdbt").specs["rep"].chunk_shape == (2, 8)


def test_parts_that_were_never_merged_are_read_as_their_union():
    ckpt = open_case("mp-0.12.8/j_kill")
    assert not ckpt.is_finished
    assert any("2 processes were never merged" in note for note in ckpt.notes)
    assert read_leaf(ckpt.source, "s") == open_case("mp-0.12.8/j_kill").source.value("s")


def test_flax_files_are_steps():
    ckpt = open_case("0.2.7/h_flax_msgpack")
    assert (ckpt.format, ckpt.step, ckpt.steps, ckpt.writer) == ("flax_msgpack", 2, (1, 2), "flax")


def test_flax_chunked_arrays_are_joined():
    source = open_checkpoint(GOLDEN / "0.12.8/x_flax_msgpack_small/chunked.msgpack").source
    (name,) = [name for name, spec in source.specs.items() if spec.kind == "array"]
    whole = read_leaf(source, name)
    assert whole.tobytes() == np.arange(whole.size, dtype=whole.dtype).tobytes()
    assert (
        read_leaf(source, name, (slice(1, 2), *(slice(0, n) for n in whole.shape[1:]))).tobytes()
        == whole[1:2].tobytes()
    )


def test_bare_array_metadatas_of_a_real_train_state():
    folder = GOLDEN / "pi05_train_state"
    paths: list[Path] = [folder, folder / "array_metadatas", folder / "array_metadatas/process_0"]
    for path in paths:
        ckpt = open_checkpoint(path)
        with pytest.warns(CheckpointWarning, match="ambiguous"):
            specs = ckpt.specs
        assert (ckpt.format, len(specs)) == ("array_metadatas", 65)
        spec = specs["opt_state/1/0/mu/PaliGemma/img/Transformer/encoder_norm/bias/value"]
        assert (spec.shape, spec.dtype, spec.is_write_shape) == ((1152,), None, True)
        assert ckpt.source.problems(list(specs)[:1]) != []


@pytest.mark.parametrize(
    ("case", "writer"),
    [
        ("0.2.7/a_pytree_default", "orbax 0.1 to 0.3"),
        ("0.4.8/c_str", "orbax 0.3.5 to 0.5.15"),
        ("0.8.0/c_constzero", "orbax 0.5.16 to 0.9"),
        ("0.11.20/f_typed_keys", "orbax 0.11.20 to 0.11.30"),
        ("0.12.8/c_top_leaf", "orbax 0.12.3 or newer"),
    ],
)
def test_the_files_tell_the_writer(case, writer):
    assert open_case(case).writer == writer
