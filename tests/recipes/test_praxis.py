"""Praxis' recipe against folders that were made from the adapter's page, row by row."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import orbaxkit as ok

WORLD = Path(__file__).parent.parent / "worlds/praxis"
SOURCE = WORLD / "source"
EXPECTED = json.loads((WORLD / "automodel.json").read_text())
RECIPE = ok.recipe("praxis")


def test_every_tensor_is_the_one_that_the_page_says(tmp_path: Path):
    ok.convert(SOURCE, tmp_path / "model.safetensors", RECIPE)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(EXPECTED)
    for name, told in EXPECTED.items():
        assert hashlib.sha256(np.ascontiguousarray(found[name]).tobytes()).hexdigest() == told["sha256"], name


def test_there_and_back_is_the_identity(tmp_path: Path):
    ok.convert(SOURCE, tmp_path / "there", RECIPE, format="safetensors", max_shard_size="9KB")
    ok.convert(tmp_path / "there", tmp_path / "back", RECIPE.inverse(), format="safetensors")
    assert not ok.diff(SOURCE, tmp_path / "back", values=True)


def test_names_that_only_look_like_the_trunks_stay():
    plan = ok.plan(SOURCE, RECIPE)
    same = [name for name in plan.source if name.startswith("action_expert/")]
    assert same
    assert all(name in plan.outputs for name in same)
    assert "backbone/decoder/registers" in plan.outputs
    assert "backbone/decoder/core/blocks/10/modulator/weight" in plan.outputs


def test_an_odd_packed_axis_is_refused_by_name():
    name = "backbone/encoder/core/blocks/1/ffn/shared/gate_up"
    tree = ok.restore(SOURCE, as_numpy=True)
    blocks = tree["backbone"]["encoder"]["core"]["blocks"]
    block = blocks[1] if isinstance(blocks, list) else blocks.get(1, blocks.get("1"))
    block["ffn"]["shared"]["gate_up"] = np.ones((8, 11), np.float32)
    with pytest.raises(ok.TransformError, match="11") as error:
        ok.plan(tree, RECIPE)
    assert [path for path, _ in error.value.leaves] == [name]


def test_half_an_expert_is_refused_by_name():
    with pytest.raises(ok.TransformError, match="blocks/1/ffn/shared/down: is missing, other layers have it"):
        ok.plan(SOURCE, ok.drop("backbone/encoder/core/blocks/1/ffn/shared/down"), RECIPE)
    with pytest.raises(ok.TransformError, match="blocks/3/mha/in_proj/k_weight: is missing"):
        ok.plan(SOURCE, ok.drop("backbone/decoder/core/blocks/3/mha/in_proj/k_weight"), RECIPE)


def test_what_a_conversion_back_leaves_out_is_dropped_after():
    back = ok.plan(SOURCE, RECIPE, RECIPE.inverse(), ok.drop("**/expert_bias"))
    assert len(back.outputs) == len(ok.plan(SOURCE).outputs) - sum("expert_bias" in name for name in back.source)
