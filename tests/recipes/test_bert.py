"""BERT's recipes against TensorFlow's own files, transformers' names and the variable lists that a user published."""

import hashlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import orbaxkit as ok
from orbaxkit.formats.tf_bundle import _paths
from orbaxkit.specs import LeafSpec, Specs

GOLDEN = Path(__file__).parent.parent / "worlds/tf_bundle"
NAMES = json.loads((GOLDEN / "hf_names.json").read_text())
VARIABLES = json.loads((GOLDEN / "bert_variables.json").read_text())
PARAMS, ADAM = GOLDEN / "a_params", GOLDEN / "b_adam"


def specs_of(variables) -> Specs:
    """What a bundle with these variables would hold."""
    paths = _paths([name for name, _ in variables])
    dtypes = {"global_step": "int64"}
    return Specs.of(
        (paths[name], LeafSpec(tuple(shape), np.dtype(dtypes.get(name, "float32")))) for name, shape in variables
    )


def test_torch_names_layouts_and_values_are_those_of_transformers(tmp_path: Path):
    ok.convert(PARAMS, tmp_path / "model.safetensors", ok.recipe("bert_hf"))
    torch = ok.restore(tmp_path / "model.safetensors", as_numpy=True)
    tensorflow = ok.restore(PARAMS, as_numpy=True)
    plan = ok.plan(tmp_path / "model.safetensors")
    assert {name.replace("/", ".") for name in plan.outputs} == set(NAMES["saved_keys"])
    for source, told in NAMES["table"].items():
        expected, found = (
            leaf_of(tensorflow, source.split("/")),
            leaf_of(torch, told["target"].split(".")),
        )
        np.testing.assert_array_equal(found, expected.T if told["op"] == "transpose" else expected)


def leaf_of(tree, path):
    for key in path:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


@pytest.mark.parametrize("name", ["bert", "bert_hf"])
def test_there_and_back_is_the_identity_slots_included(tmp_path: Path, name: str):
    ok.convert(ADAM, tmp_path / "there", ok.recipe(name))
    ok.convert(tmp_path / "there", tmp_path / "back", ok.recipe(name).inverse())
    assert len(ok.open(tmp_path / "back").specs) == 187
    found = ok.diff(ADAM, tmp_path / "back", values=True)
    assert not found, str(found)


def test_through_safetensors_and_back(tmp_path: Path):
    ok.convert(ADAM, tmp_path / "torch", ok.recipe("bert_hf"), format="safetensors", max_shard_size="100KB")
    ok.convert(tmp_path / "torch", tmp_path / "back", ok.recipe("bert_hf").inverse())
    assert not ok.diff(ADAM, tmp_path / "back", values=True)


def test_the_published_lists_are_accounted_for():
    pretrained, trained = specs_of(VARIABLES["pretrained"]), specs_of(VARIABLES["trained"])
    assert (len(pretrained), len(trained)) == (206, 206 + 206 + 206 + 1)
    plan = ok.plan(pretrained, ok.recipe("bert"))
    assert len(plan.outputs) == 206
    assert not plan.dropped
    assert all(name.startswith("params/") for name in plan.outputs)
    plan = ok.plan(trained, ok.recipe("bert"))
    kinds = [re.match(r"params|opt_state/0/(mu|nu|count)", name)[0] for name in plan.outputs]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "params": 206, "opt_state/0/mu": 206, "opt_state/0/nu": 206, "opt_state/0/count": 1,
    }  # fmt: skip
    assert not plan.dropped
    assert plan.specs["params/cls/seq_relationship/kernel"].shape == (768, 2)


def test_adams_slots_are_an_optax_state_that_trains_on(tmp_path: Path):
    ok.convert(ADAM, tmp_path / "flax", ok.recipe("bert"))
    tx = optax.adamw(optax.linear_schedule(1e-4, 0.0, 1000), eps=1e-6, weight_decay=0.01)
    params = ok.restore_params(tmp_path / "flax")
    adam, _, schedule = state = ok.migrate_opt_state(tmp_path / "flax", tx)
    assert (int(adam.count), int(schedule.count)) == (20, 20)
    expected = json.loads((ADAM / "expected.json").read_text())
    for slot, moments in (("adam_m", adam.mu), ("adam_v", adam.nu)):
        kernel = np.asarray(moments["bert"]["pooler"]["dense"]["kernel"])
        told = expected[f"bert/pooler/dense/kernel/{slot}"]
        assert hashlib.sha256(kernel.tobytes()).hexdigest() == told["sha256"]
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), state, params)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(updates))
    rebuilt = ok.rebuild_opt_state(tmp_path / "flax", optax.chain(optax.scale_by_adam()))[0]
    np.testing.assert_array_equal(
        rebuilt.mu["bert"]["pooler"]["dense"]["bias"], adam.mu["bert"]["pooler"]["dense"]["bias"]
    )


def test_a_count_at_the_end_of_int32_switches_optax_bias_correction_off():
    """BERT's own Adam has none: with this count, optax's takes the same steps."""
    rng = np.random.default_rng(0)
    m, v, gradient = (rng.random(8, np.float32) for _ in range(3))
    state = optax.ScaleByAdamState(jnp.asarray(2**31 - 1, jnp.int32), {"w": m}, {"w": v})
    update, state = optax.scale_by_adam(eps=1e-6).update({"w": gradient}, state)
    next_m, next_v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    np.testing.assert_allclose(update["w"], next_m / (np.sqrt(next_v) + 1e-6), rtol=1e-5)
    assert int(state.count) == 2**31 - 1


def test_without_slots_the_optimizer_starts_fresh(tmp_path: Path):
    ok.convert(PARAMS, tmp_path / "flax", ok.recipe("bert"))
    assert not [name for name in ok.open(tmp_path / "flax").specs if "opt_state" in name]
    state = ok.reset_optimizer(tmp_path / "flax", optax.adamw(1e-4))
    assert int(state["opt_state"][0].count) == 0


def test_a_larger_vocabulary_takes_the_old_rows_where_a_map_says(tmp_path: Path):
    """The case that was asked for: 30,522 rows into 60,812, the rest from the target, their moments zero."""
    rng = np.random.default_rng(1)
    old, mu, new = (rng.random((rows, 3), np.float32) for rows in (30522, 30522, 60812))
    rows = np.arange(1000, 31522)  # moved along as a block, but for some that went anywhere
    rows[:1000] = rng.permutation(np.r_[0:1000, 31522:60812])[:1000]
    rng.shuffle(rows[:2000])
    state = {
        "params": {"embedding": old},
        "opt_state": [{"count": np.int32(3), "mu": {"embedding": mu}, "nu": {"embedding": mu}}],
    }
    made = ok.apply(state, ok.place_rows("params/embedding", rows, into=new))
    expected = new.copy()
    expected[rows] = old
    np.testing.assert_array_equal(made["params"]["embedding"], expected)
    moments = np.zeros_like(new)
    moments[rows] = mu
    for slot in ("mu", "nu"):
        np.testing.assert_array_equal(made["opt_state"][0][slot]["embedding"], moments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (ok.drop("bert/encoder/layer_1/**"), "bert/encoder/layer_1/attention/self/query/kernel: is missing"),
        (ok.drop("bert/encoder/layer_1/output/dense/bias"), "output/dense/bias: is missing, other layers have it"),
        (ok.drop("bert/embeddings/word_embeddings"), "bert/embeddings/word_embeddings: is missing"),
        (ok.rename({"cls/predictions/**": "cls/squad/**"}), "cls/squad/output_bias: no row knows it"),
        (ok.rename({"bert/pooler/dense/kernel": "bert/pooler/dense/kernels"}), "nearest is bert/pooler/dense/kernel"),
        (ok.rename({"bert/**": "encoder/**", "cls/**": "heads/**"}), "this holds no params of BERT's TensorFlow"),
        (ok.recipe("bert_hf"), r"it looks like BERT's torch tensors: recipe\('bert_hf'\).inverse\(\)|no row knows"),
    ],
    ids=["layer", "leaf of a layer", "leaf", "head", "typo", "root", "twice"],
)  # fmt: skip
def test_leaves_that_are_not_berts_are_refused_by_name(change, says: str):
    with pytest.raises(ok.TransformError) as error:
        ok.plan(PARAMS, change, ok.recipe("bert_hf"))
    told = "\n".join([str(error.value), *(f"{path}: {problem}" for path, problem in error.value.leaves)])
    assert re.search(says, told)


def test_a_slice_maps_its_rows_and_leaves_the_rest():
    plan = ok.plan(PARAMS, ok.recipe("bert_hf")["bert/pooler/**"])
    assert "bert/pooler/dense/weight" in plan.outputs
    assert "bert/embeddings/word_embeddings" in plan.outputs
    with pytest.raises(ok.TransformError, match="matches no row"):
        ok.recipe("bert_hf")["bert/poler/**"]


def test_an_unknown_recipe_or_option_lists_what_there_is():
    with pytest.raises(ok.TransformError, match="one of bert, bert_hf, openpi"):
        ok.recipe("brt")
    with pytest.raises(ok.TransformError, match="no such option"):
        ok.recipe("bert", heads=3)


def test_it_prints_as_a_table_and_as_a_call():
    text = str(ok.recipe("bert_hf"))
    assert text.startswith("BERT's TensorFlow variables -> BERT's torch tensors\n")
    assert re.search(
        r"layer_\{i\}/output/dense/kernel +-> +bert/encoder/layer/\{i\}/output/dense/weight +i o -> o i", text
    )
    assert repr(ok.recipe("bert").inverse()) == "recipe('bert').inverse()"


def test_transformers_loads_it_strictly_and_gives_the_reference_logits(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, type_vocab_size=2,
    )  # fmt: skip
    ok.convert(PARAMS, tmp_path / "model.safetensors", ok.recipe("bert_hf"))
    config.save_pretrained(tmp_path)
    model, told = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    reference = np.load(GOLDEN / "hf_reference.npz")
    inputs = {name: torch.tensor(reference[name]) for name in ("input_ids", "token_type_ids", "attention_mask")}
    with torch.no_grad():
        out = model.eval()(**inputs)
    np.testing.assert_allclose(out.prediction_logits.numpy(), reference["prediction_logits"], atol=1e-4)
    np.testing.assert_allclose(out.seq_relationship_logits.numpy(), reference["seq_relationship_logits"], atol=1e-4)


def flax_with(tx, tmp_path: Path, name: str = "flax"):
    params = ok.restore(PARAMS, ok.recipe("bert"))["params"]
    return ok.convert({"params": params, "opt_state": tx.init(params)}, tmp_path / name)


def test_states_that_a_bundle_cannot_hold_are_refused_on_the_way_back(tmp_path: Path):
    adam = optax.adam(1e-3)
    for name, tx, says in (
        ("clip", optax.chain(optax.clip_by_global_norm(1.0), adam), "rename it to that first"),
        ("ema", optax.chain(adam, optax.ema(0.9)), "has no place among Adam's slots"),
        ("steps", optax.MultiSteps(adam, 2), "has no place among Adam's slots"),
        ("schedule", optax.adam(optax.constant_schedule(1.0)), "opt_state/1/count"),
    ):
        with pytest.raises(ok.TransformError, match="more than TensorFlow's BERT has") as error:
            ok.plan(flax_with(tx, tmp_path, name), ok.recipe("bert").inverse())
        assert any(says in f"{path}: {told}" for path, told in error.value.leaves), error.value.leaves
    there = flax_with(optax.adamw(1e-3), tmp_path)
    ok.convert(there, tmp_path / "tf", ok.recipe("bert").inverse())
    ok.convert(tmp_path / "tf", tmp_path / "back", ok.recipe("bert"))
    assert not ok.diff(
        there, tmp_path / "back", ok.drop("opt_state/1", "opt_state/2"), ok.select("**"), values=True
    ).values


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (ok.drop("**/*adam_v"), "there is no adam_m or no adam_v beside it"),
        (ok.drop("global_step"), "global_step: is missing beside the slots"),
        (ok.transpose("bert/embeddings/word_embeddings"), "has another shape than its variable"),
    ],
    ids=["half", "step", "shape"],
)
def test_slots_that_are_not_whole_are_refused_by_name(change, says: str):
    with pytest.raises(ok.TransformError) as error:
        ok.plan(ADAM, change, ok.recipe("bert"))
    assert any(says in f"{path}: {told}" for path, told in error.value.leaves)


def test_heads_beside_bert_are_refused_by_name():
    head = ok.fill("output_weights", np.zeros((2, 32), np.float32))
    with pytest.raises(ok.TransformError, match="output_weights: no row knows it"):
        ok.plan(PARAMS, head, ok.recipe("bert"))
    assert ok.plan(PARAMS, head, ok.drop("output_weights"), ok.recipe("bert"))


def test_a_slice_keeps_moments_with_their_params_and_comes_back():
    part = ok.recipe("bert")["bert/encoder/**"]
    plan = ok.plan(ADAM, part)
    params = {name for name in plan.outputs if not name.startswith("opt_state")}
    moments = {name.removeprefix("opt_state/0/mu/") for name in plan.outputs if name.startswith("opt_state/0/mu/")}
    assert moments == params


def test_a_hint_that_chooses_one_of_several_works():
    params = ok.restore(PARAMS, as_numpy=True)
    both = {"student": params, "teacher": params}
    with pytest.raises(ok.TransformError, match=r"ok.select\('student/\*\*'\)"):
        ok.plan(both, ok.recipe("bert_hf"))
    assert len(ok.plan(both, ok.select("student/**"), ok.recipe("bert_hf")).outputs) == 62
