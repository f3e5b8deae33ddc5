"""openpi's recipe against what openpi's own converter makes of a small pi0.5 step that openpi wrote."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import orbaxkit as ok
from orbaxkit.recipes.openpi import openpi

GOLDEN = Path(__file__).parent.parent / "worlds/pi05_tiny"
CKPT = GOLDEN / "ckpt"
PYTORCH = json.loads((GOLDEN / "pytorch.json").read_text())
BACK = ok.recipe("openpi", vision_heads=3).inverse()
# What an nnx state has and released checkpoints have not: the item, and `value` at the end of each path.
PLAIN = ok.rename({
    "params/params/**/value": "params/**",
    "train_state/opt_state/1/0/{field}/**/value": "train_state/opt_state/1/0/{field}/**",
})  # fmt: skip


def test_every_tensor_is_the_one_that_openpis_converter_gives(tmp_path: Path):
    ok.convert(CKPT, tmp_path / "model.safetensors", ok.select("params/**"), ok.cast("float32"), ok.recipe("openpi"))
    source = ok.open(tmp_path / "model.safetensors").source
    assert {name.replace("/", ".") for name in source.specs} == set(PYTORCH)
    for name, spec in source.specs.items():
        out = np.empty(spec.shape, spec.dtype)
        source.read(name, tuple(slice(0, size) for size in spec.shape), out).result()
        told = PYTORCH[name.replace("/", ".")]
        assert list(spec.shape) == told["shape"]
        assert hashlib.sha256(out.tobytes()).hexdigest() == told["sha256"], name


def test_a_whole_step_goes_through_safetensors_and_back_moments_included(tmp_path: Path):
    ok.convert(CKPT, tmp_path / "torch", ok.recipe("openpi"), format="safetensors")
    moments = [name for name in ok.open(tmp_path / "torch").specs if name.startswith("train_state/opt_state/1/0/mu/")]
    assert f"{moments[0]}".startswith("train_state/opt_state/1/0/mu/paligemma_with_expert/")
    ok.convert(tmp_path / "torch", tmp_path / "back", BACK)
    found = ok.diff(CKPT, tmp_path / "back", PLAIN, values=True)
    assert not found, str(found)
    assert found.compared > 110


def test_torch_to_jax_and_back_is_the_identity():
    params = ok.restore(CKPT, ok.select("params/**"), ok.recipe("openpi"), as_numpy=True)
    assert not ok.diff(ok.apply(ok.apply(params, BACK), ok.recipe("openpi")), params, values=True)


def test_dtypes_stay():
    plan = ok.plan(CKPT, ok.recipe("openpi"))
    assert (
        plan.specs["paligemma_with_expert/paligemma/model/language_model/embed_tokens/weight"].dtype_name == "bfloat16"
    )
    assert plan.specs["action_in_proj/weight"].dtype_name == "float32"


def test_pi0_has_plain_norms_and_a_state_projection():
    """The same step as a pi0 would have it: rows of the other variant, none of pi0.5's."""
    tree = ok.restore(CKPT, ok.select("params/**"), strip_value=True, as_numpy=True)["params"]["params"]
    layers = tree["PaliGemma"]["llm"]["layers"]
    for name in ("pre_attention_norm_1", "pre_ffw_norm_1"):
        layers[name] = {"scale": np.ones((3, 24), np.float32)}
    tree["PaliGemma"]["llm"]["final_norm_1"] = {"scale": np.ones(24, np.float32)}
    dense = {"kernel": np.ones((8, 24), np.float32), "bias": np.ones(24, np.float32)}
    del tree["time_mlp_in"], tree["time_mlp_out"]
    with pytest.raises(ok.TransformError, match="state_proj/kernel: is missing"):
        ok.plan(tree, ok.recipe("openpi"))
    tree |= {"state_proj": dense, "action_time_mlp_in": dense, "action_time_mlp_out": dense}
    plan = ok.plan(tree, ok.recipe("openpi"))
    assert plan.specs["state_proj/weight"].shape == (24, 8)
    assert "paligemma_with_expert/gemma_expert/model/norm/weight" in plan.outputs
    assert not ok.diff(ok.apply(ok.apply(tree, ok.recipe("openpi")), BACK)["params"], tree, values=True)


def with_lora(rank: int = 2) -> dict:
    """The step with LoRA pairs beside the expert's weights, in openpi's names and shapes."""
    rng = np.random.default_rng(0)
    tree = ok.restore(CKPT, ok.select("params/**"), strip_value=True, as_numpy=True)["params"]["params"]
    tree = jax.tree.map(
        lambda x: x.astype(np.float32), tree
    )  # frozen weights are bfloat16, in which a merge would round
    layers = tree["PaliGemma"]["llm"]["layers"]
    for name in ("q_einsum_1", "kv_einsum_1", "attn_vec_einsum_1"):
        shape = layers["attn"][name]["w"].shape
        layers["attn"][name]["lora_a"] = rng.random((*shape[:-1], rank), np.float32)
        layers["attn"][name]["lora_b"] = rng.random((*shape[:-2], rank, shape[-1]), np.float32)
    for name in ("gating_einsum", "linear"):
        shape = layers["mlp_1"][name].shape
        layers["mlp_1"][f"{name}_lora_a"] = rng.random((*shape[:-1], rank), np.float32)
        layers["mlp_1"][f"{name}_lora_b"] = rng.random((*shape[:-2], rank, shape[-1]), np.float32)
    return tree


def test_lora_pairs_are_merged_as_openpi_multiplies_them():
    """Against openpi's own einsums: `lora.py` adds (x A) B to x W, and sums over heads twice in attn_vec_einsum."""
    tree = with_lora()
    layers = tree["PaliGemma"]["llm"]["layers"]
    with pytest.raises(ok.TransformError, match='recipe\\("openpi", lora="merge"\\)'):
        ok.plan(tree, ok.recipe("openpi"))
    made = ok.apply(tree, ok.recipe("openpi", lora="merge", lora_scale=0.5))
    layer = made["paligemma_with_expert"]["gemma_expert"]["model"]["layers"]
    layer = layer[1] if isinstance(layer, list) else layer.get(1, layer.get("1"))

    attn = {name: {k: v[1].astype(np.float32) for k, v in pair.items()} for name, pair in layers["attn"].items()}
    q = attn["q_einsum_1"]
    x = np.random.default_rng(1).random((5, q["w"].shape[1]), np.float32)
    expected = jnp.einsum("td,ndh->tnh", x, q["w"]) + 0.5 * jnp.einsum(
        "tnl,nlh->tnh", jnp.einsum("td,ndl->tnl", x, q["lora_a"]), q["lora_b"]
    )
    np.testing.assert_allclose(x @ layer["self_attn"]["q_proj"]["weight"].T, expected.reshape(5, -1), rtol=1e-4)

    o = attn["attn_vec_einsum_1"]
    y = np.random.default_rng(2).random((5, *o["w"].shape[:2]), np.float32)
    low = jnp.einsum("tnh,nhl->tnl", y, o["lora_a"]).sum(1)
    expected = jnp.einsum("tnh,nhd->td", y, o["w"]) + 0.5 * jnp.einsum("tl,nld->td", low, o["lora_b"])
    np.testing.assert_allclose(y.reshape(5, -1) @ layer["self_attn"]["o_proj"]["weight"].T, expected, rtol=1e-4)

    mlp = {name: array[1].astype(np.float32) for name, array in layers["mlp_1"].items()}
    gate = mlp["gating_einsum"][0] + mlp["gating_einsum_lora_a"][0] @ mlp["gating_einsum_lora_b"][0]
    np.testing.assert_allclose(layer["mlp"]["gate_proj"]["weight"], gate.T, rtol=1e-5)


def test_lora_pairs_can_be_kept_and_come_back():
    tree = with_lora()
    keep = ok.recipe("openpi", lora="keep")
    made = ok.apply(tree, keep)
    back = ok.apply(made, ok.recipe("openpi", lora="keep", vision_heads=3).inverse())
    assert not ok.diff(back["params"], tree, values=True)


def test_the_ema_and_the_live_params_are_two_sets_of_which_one_is_chosen():
    params = ok.restore(CKPT, ok.select("params/**"), strip_value=True, as_numpy=True)["params"]["params"]
    both = {"params": {"params": params}, "train_state": {"params": params, "step": 3}}
    with pytest.raises(ok.TransformError, match="several nodes hold params") as error:
        ok.plan(both, ok.recipe("openpi"))
    assert [path for path, _ in error.value.leaves] == ["params/params", "train_state/params"]
    assert len(ok.plan(both, ok.select("train_state/**"), ok.recipe("openpi")).outputs) == len(PYTORCH) + 1


def test_heads_that_the_tensors_do_not_tell_have_to_be_named():
    made = ok.restore(CKPT, ok.select("params/**"), ok.recipe("openpi"), as_numpy=True)
    with pytest.raises(ok.TransformError, match="how many heads a vision tower 24 wide has"):
        ok.plan(made, ok.recipe("openpi").inverse())
    with pytest.raises(ok.TransformError, match=r"it looks like openpi's PyTorch tensors: recipe\('openpi'\).inverse"):
        ok.plan(made, ok.recipe("openpi"))


def test_two_key_value_heads_are_refused():
    tree = ok.restore(CKPT, ok.select("params/**"), strip_value=True, as_numpy=True)["params"]["params"]
    kv = tree["PaliGemma"]["llm"]["layers"]["attn"]["kv_einsum"]
    kv["w"] = np.concatenate([kv["w"]] * 2, axis=2)
    with pytest.raises(ok.TransformError, match="an axis of 2"):
        ok.plan(tree, ok.recipe("openpi"))


def test_no_row_is_there_twice():
    rows = openpi(lora="keep").rows
    for side in ("origin", "goal"):
        names = [getattr(row, side) for row in rows]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "options", [{"format": "safetensors"}, {"as_step": 7}, {}], ids=["safetensors", "step", "item"]
)
def test_assets_come_along(tmp_path: Path, options: dict):
    out = ok.convert(CKPT, tmp_path / "out", ok.select("params/**"), ok.recipe("openpi"), **options)
    (saved,) = CKPT.glob("3/assets/**/norm_stats.json")
    (copied,) = Path(out).glob("assets/**/norm_stats.json")
    assert copied.read_bytes() == saved.read_bytes()
    assert copied.relative_to(out) == saved.relative_to(CKPT / "3")
    assert ok.verify(out)


@pytest.mark.parametrize("part", ["PaliGemma/img/**", "PaliGemma/llm/**"])
def test_a_slice_maps_its_leaves_where_they_are_and_comes_back(part: str):
    tree = ok.restore(CKPT, ok.select("params/**"), strip_value=True, as_numpy=True)
    piece = ok.recipe("openpi", vision_heads=3)[part]
    made = ok.apply(tree, piece)
    assert "action_in_proj" in made["params"]["params"]
    back = ok.apply(made, piece.inverse())
    assert not ok.diff(back, tree, values=True)


@pytest.mark.parametrize("options", [{"lora_scale": "abc"}, {"lora_scale": float("nan")}, {"vision_heads": 0}])
def test_options_that_cannot_be_meant_are_refused(options: dict):
    with pytest.raises(Exception, match=r"lora_scale|vision_heads"):
        ok.recipe("openpi", lora="merge", **options)
