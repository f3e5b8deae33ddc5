"""Perceiver's recipe against the names and layouts that transformers' own script gave, and its model's outputs."""

import json
from pathlib import Path

import numpy as np
import pytest

import orbaxkit as ok
from orbaxkit.specs import LeafSpec, Specs

WORLD = Path(__file__).parent.parent / "worlds/perceiver"
SOURCE = WORLD / "language_tiny.flatmapping.pickle"
NAMES = json.loads((WORLD / "name_map.json").read_text())
IMAGES = json.loads((WORLD / "image_name_maps.json").read_text())


def test_names_layouts_and_values_are_those_of_transformers_script():
    haiku = ok.restore(SOURCE, as_numpy=True)
    plan = ok.plan(SOURCE, ok.recipe("perceiver"))
    assert {name.replace("/", ".") for name in plan.outputs} == {t["target"] for t in NAMES["table"].values()}
    torch = ok.restore(SOURCE, ok.recipe("perceiver"), as_numpy=True)
    for name, told in NAMES["table"].items():
        module, _, param = name.rpartition("/")
        found = torch
        for key in told["target"].split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        expected = haiku[module][param]
        np.testing.assert_array_equal(found, expected.T if "transpose" in told["op"] else expected)


def test_there_and_back_is_the_identity(tmp_path: Path):
    recipe = ok.recipe("perceiver")
    ok.convert(SOURCE, tmp_path / "model.safetensors", recipe)
    ok.convert(tmp_path / "model.safetensors", tmp_path / "back", recipe.inverse())
    found = ok.diff(SOURCE, tmp_path / "back", values=True)
    assert not found, str(found)


def image_specs(variant: str) -> Specs:
    """The names and shapes of an ImageNet checkpoint, as its pickle has them: params and BatchNorm's state."""
    leaves = []
    for name, told in IMAGES[variant]["table"].items():
        module, _, param = name.rpartition("/")
        part = "state" if "_ema/" in name else "params"
        leaves.append(((part, module, param), LeafSpec(tuple(told["source_shape"]), np.dtype("float32"))))
    return Specs.of(leaves)


@pytest.mark.parametrize("variant", IMAGES)
def test_image_variants_have_the_scripts_names_and_shapes(variant: str):
    specs = image_specs(variant)
    bookkeeping = [name for name in specs if name.endswith(("/counter", "/hidden"))]
    rules = [ok.drop(*map(str, bookkeeping))] if bookkeeping else []
    plan = ok.plan(specs, *rules, ok.recipe("perceiver", conv="transformers 4.30"))
    wanted = {t["target"].replace(".", "/"): t for t in IMAGES[variant]["table"].values() if t["target"]}
    root = "params/" if any(name.startswith("params/") for name in plan.outputs) else ""
    assert {name.removeprefix(root) for name in plan.outputs} == set(wanted)
    for name, told in wanted.items():
        assert list(plan.specs[root + name].shape) == told["target_shape"], name
    if bookkeeping:
        with pytest.raises(ok.TransformError, match="BatchNorm's own bookkeeping"):
            ok.plan(specs, ok.recipe("perceiver"))


def test_convolutions_are_laid_out_as_torch_wants_unless_asked_otherwise():
    specs = image_specs("conv").subset(n for n in image_specs("conv") if not n.endswith(("/counter", "/hidden")))
    name = "image_preprocessor/~/conv2_d_downsample/~/conv"
    (kernel,) = [n for n in specs if name in n]
    rng = np.random.default_rng(0)
    w = rng.random((3, 5, 2, 4), np.float32)  # [height, width, in, out]
    for conv, axes in (("torch", (3, 2, 0, 1)), ("transformers 4.30", (3, 2, 1, 0))):
        made = ok.apply({"w": w}, ok.reshape("w", _layout(conv)))["w"]
        np.testing.assert_array_equal(made, w.transpose(axes))
    assert kernel
    with pytest.raises(ok.TransformError, match=r"one of 'torch', 'transformers 4\.30'"):
        ok.recipe("perceiver", conv="hf")


def _layout(conv: str) -> str:
    (row,) = [row for row in ok.recipe("perceiver", conv=conv).rows if row.goal.endswith("convnet/conv/weight")]
    return row.layout


def test_missing_blocks_are_refused_by_name():
    drop = ok.drop('"perceiver_encoder/~/self_attention_1/mlp/linear"/w')
    with pytest.raises(ok.TransformError, match="self_attention/1/mlp/linear/w: is missing, other layers have it"):
        ok.plan(SOURCE, drop, ok.recipe("perceiver"))


def test_transformers_loads_it_strictly_and_gives_the_reference_logits(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.PerceiverConfig(**NAMES["hf_config"])
    ok.convert(SOURCE, tmp_path / "model.safetensors", ok.recipe("perceiver"))
    config.save_pretrained(tmp_path)
    model, told = transformers.PerceiverForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    reference = np.load(WORLD / "hf_reference.npz")
    inputs, mask = torch.tensor(reference["input_ids"]).long(), torch.tensor(reference["attention_mask"])
    with torch.no_grad():
        logits = model.eval()(inputs=inputs, attention_mask=mask).logits.numpy()
    at = reference["attention_mask"] == 1
    np.testing.assert_allclose(logits[at], reference["logits_gelu"][at], atol=1e-4)
