"""match on what frameworks call things, with the truth written by hand, and on trees and chains made up at random."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit.execute.memory import memory_source


def tree_of(shapes: dict[str, tuple[int, ...]]) -> dict:
    """A flat tree of random arrays; as on disk, a path is one key for each of its segments."""
    rng = np.random.default_rng(0)
    tree: dict = {}
    for name, shape in shapes.items():
        *path, last = name.split("/")
        node = tree
        for segment in path:
            node = node.setdefault(segment, {})
        node[last] = rng.random(shape, np.float32)
    return tree


LLAMA = {
    "embedder/input_embedding": ("model/embed_tokens/weight", (40, 8), ""),
    "layers_{i}/pre_attention_norm/scale": ("model/layers/{i}/input_layernorm/weight", (8,), ""),
    "layers_{i}/attn/q_proj/kernel": ("model/layers/{i}/self_attn/q_proj/weight", (8, 8), "i o -> o i"),
    "layers_{i}/attn/k_proj/kernel": ("model/layers/{i}/self_attn/k_proj/weight", (8, 4), "i o -> o i"),
    "layers_{i}/attn/v_proj/kernel": ("model/layers/{i}/self_attn/v_proj/weight", (8, 4), "i o -> o i"),
    "layers_{i}/attn/o_proj/kernel": ("model/layers/{i}/self_attn/o_proj/weight", (8, 8), "i o -> o i"),
    "layers_{i}/pre_ffw_norm/scale": ("model/layers/{i}/post_attention_layernorm/weight", (8,), ""),
    "layers_{i}/mlp/gate_proj/kernel": ("model/layers/{i}/mlp/gate_proj/weight", (8, 24), "i o -> o i"),
    "layers_{i}/mlp/up_proj/kernel": ("model/layers/{i}/mlp/up_proj/weight", (8, 24), "i o -> o i"),
    "layers_{i}/mlp/down_proj/kernel": ("model/layers/{i}/mlp/down_proj/weight", (24, 8), "i o -> o i"),
    "final_norm/scale": ("model/norm/weight", (8,), ""),
    "lm_head/kernel": ("lm_head/weight", (8, 40), "i o -> o i"),
}
_HEADS = "d n h -> (n h) d"
_BLOCK, _LAYER = "Transformer/encoderblock_{i}", "encoder/layer/{i}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"
VIT = {  # the Flax linen model of big_vision, and transformers' ViT
    "embedding/kernel": ("embeddings/patch_embeddings/projection/weight", (4, 4, 3, 12), "h w i o -> o i h w"),
    "embedding/bias": ("embeddings/patch_embeddings/projection/bias", (12,), ""),
    "pos_embedding": ("embeddings/position_embeddings", (1, 9, 12), ""),
    f"{_BLOCK}/LayerNorm_0/scale": (f"{_LAYER}/layernorm_before/weight", (12,), ""),
    f"{_BLOCK}/LayerNorm_0/bias": (f"{_LAYER}/layernorm_before/bias", (12,), ""),
    f"{_ATTENTION}/query/kernel": (f"{_LAYER}/attention/attention/query/weight", (12, 3, 4), _HEADS),
    f"{_ATTENTION}/query/bias": (f"{_LAYER}/attention/attention/query/bias", (3, 4), "n h -> (n h)"),
    f"{_ATTENTION}/key/kernel": (f"{_LAYER}/attention/attention/key/weight", (12, 3, 4), _HEADS),
    f"{_ATTENTION}/key/bias": (f"{_LAYER}/attention/attention/key/bias", (3, 4), "n h -> (n h)"),
    f"{_ATTENTION}/value/kernel": (f"{_LAYER}/attention/attention/value/weight", (12, 3, 4), _HEADS),
    f"{_ATTENTION}/value/bias": (f"{_LAYER}/attention/attention/value/bias", (3, 4), "n h -> (n h)"),
    f"{_ATTENTION}/out/kernel": (f"{_LAYER}/attention/output/dense/weight", (3, 4, 12), "n h d -> d (n h)"),
    f"{_ATTENTION}/out/bias": (f"{_LAYER}/attention/output/dense/bias", (12,), ""),
    f"{_BLOCK}/LayerNorm_1/scale": (f"{_LAYER}/layernorm_after/weight", (12,), ""),
    f"{_BLOCK}/LayerNorm_1/bias": (f"{_LAYER}/layernorm_after/bias", (12,), ""),
    f"{_BLOCK}/MlpBlock_0/Dense_0/kernel": (f"{_LAYER}/intermediate/dense/weight", (12, 20), "i o -> o i"),
    f"{_BLOCK}/MlpBlock_0/Dense_0/bias": (f"{_LAYER}/intermediate/dense/bias", (20,), ""),
    f"{_BLOCK}/MlpBlock_0/Dense_1/kernel": (f"{_LAYER}/output/dense/weight", (20, 12), "i o -> o i"),
    f"{_BLOCK}/MlpBlock_0/Dense_1/bias": (f"{_LAYER}/output/dense/bias", (12,), ""),
    "Transformer/encoder_norm/scale": ("layernorm/weight", (12,), ""),
    "Transformer/encoder_norm/bias": ("layernorm/bias", (12,), ""),
    "head/kernel": ("classifier/weight", (12, 5), "i o -> o i"),
    "head/bias": ("classifier/bias", (5,), ""),
}
_ROW, _HF = "h_{i}", "decoder/layers/{i}"
OPT = {  # Haiku's numbers alone on the one side
    "embed/embeddings": ("decoder/embed_tokens/weight", (30, 8), ""),
    f"{_ROW}/layer_norm/scale": (f"{_HF}/self_attn_layer_norm/weight", (8,), ""),
    f"{_ROW}/layer_norm/offset": (f"{_HF}/self_attn_layer_norm/bias", (8,), ""),
    f"{_ROW}/attention/linear/w": (f"{_HF}/self_attn/q_proj/weight", (8, 8), "i o -> o i"),
    f"{_ROW}/attention/linear_1/w": (f"{_HF}/self_attn/k_proj/weight", (8, 8), "i o -> o i"),
    f"{_ROW}/attention/linear_2/w": (f"{_HF}/self_attn/v_proj/weight", (8, 8), "i o -> o i"),
    f"{_ROW}/attention/linear_3/w": (f"{_HF}/self_attn/out_proj/weight", (8, 8), "i o -> o i"),
    f"{_ROW}/mlp/linear/w": (f"{_HF}/fc1/weight", (8, 32), "i o -> o i"),
    f"{_ROW}/mlp/linear_1/w": (f"{_HF}/fc2/weight", (32, 8), "i o -> o i"),
}
# The least share that is right by specs.
WORLDS = {"llama": (LLAMA, 1.0), "vit": (VIT, 1.0), "haiku opt": (OPT, 0.8)}


def both_trees(world):
    """A tree as the one framework has it, the other's made of it by rules, and which leaf of it becomes which."""
    names = {name.replace("{i}", str(k)): shape for name, (_, shape, _) in world.items() for k in range(3)}
    truth = {
        name.replace("{i}", str(k)): goal.replace("{i}", str(k))
        for name, (goal, _, _) in world.items()
        for k in range(3)
    }
    rules = [ok.reshape(name, layout) for name, (_, _, layout) in world.items() if layout]
    a = tree_of(names)
    return a, ok.apply(a, *rules, ok.rename(truth)), truth


@pytest.mark.parametrize("values", [False, True], ids=["specs", "values"])
@pytest.mark.parametrize("name", WORLDS)
def test_other_worlds_are_found_and_nothing_is_wrong(name: str, values: bool):
    world, least = WORLDS[name]
    a, b, truth = both_trees(world)
    found = ok.match(a, b, values=values)
    proposed = {x: y for pair in found.pairs for x, y in zip(pair.ours.names, pair.theirs.names, strict=True)}
    assert {x: y for x, y in proposed.items() if truth[x] != y} == {}
    assert len(proposed) >= (1 if values else least) * len(truth), str(found)
    made, wanted = ok.apply(a, found.transform), b
    problems = ok.diff(made, wanted, values=True)
    assert not problems or len(proposed) < len(truth)


def test_scanned_layers_and_layers_apart():
    a, b, _ = both_trees(LLAMA)
    scanned = ok.apply(a, ok.stack("layers_{i}", into="layers"))
    for one, other in ((scanned, b), (b, scanned)):
        found = ok.match(one, other)
        assert not found.only_in_a, str(found)
        assert not ok.diff(ok.apply(one, found.transform), other, values=True)


def draw_parts(draw, size: int) -> list[int]:
    """Two or three sizes that add up."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=min(2, size - 1))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@st.composite
def trees_and_rules(draw):
    """A tree of random arrays, and a rule or two for each of its leaves."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tree, rules = {}, []
    for k in range(draw(st.integers(1, 4))):
        name, shape = f"leaf{k}", tuple(draw(st.lists(st.integers(2, 4), min_size=2, max_size=3)))
        tree[name] = rng.random(shape)
        kind = draw(st.sampled_from(["none", "transpose", "unstack", "split", "rename"]))
        if kind == "transpose":
            rules.append(ok.transpose(name, [1, 0, *range(2, len(shape))]))
        if kind == "unstack":
            rules.append(ok.unstack(name, into=f"block{k}_{{i}}", axis=0))
        if kind == "split":
            sizes = draw_parts(draw, shape[1])
            rules.append(ok.split(name, into=[f"p{k}/x{j}" for j in range(len(sizes))], axis=1, sizes=sizes))
        if kind == "rename":
            rules.append(ok.rename({name: f"module/{name}"}))
    return tree, ok.chain(*rules)


@settings(max_examples=60, deadline=None)
@given(trees_and_rules(), st.booleans())
def test_what_values_prove_makes_the_other_tree_bit_for_bit(case, is_backwards):
    tree, rules = case
    a, b = (ok.apply(tree, rules), tree) if is_backwards else (tree, ok.apply(tree, rules))
    found = ok.match(a, b, values=True)
    made = leaves_of(ok.apply(a, found.transform)) if found.pairs else {}
    wanted = leaves_of(b)
    for pair in found.pairs:
        assert pair.sure == "proved"
        for name in pair.theirs.names:
            assert made[name].shape == wanted[name].shape
            assert made[name].tobytes() == wanted[name].tobytes()
    told = {name for pair in found.pairs for name in pair.theirs.names}
    assert told | set(found.only_in_b) == set(wanted)


@settings(max_examples=60, deadline=None)
@given(trees_and_rules())
def test_what_specs_propose_can_be_applied(case):
    tree, rules = case
    b = ok.apply(tree, rules)
    found = ok.match(tree, b)
    made, wanted = leaves_of(ok.apply(tree, found.transform)) if found.pairs else {}, leaves_of(b)
    for pair in found.pairs:
        assert all(made[name].shape == wanted[name].shape for name in pair.theirs.names)


def leaves_of(tree):
    return {name: np.asarray(value) for name, value in memory_source(tree).values.items()}


def test_a_tree_is_itself_and_a_leaf_with_another_name_is_likely_the_one_that_is_left():
    a = tree_of({"x/kernel": (3, 4), "x/bias": (4,), "y/bias": (4,)})
    found = ok.match(a, a)
    assert [pair.sure for pair in found.pairs] == ["certain"] * 3
    assert ok.apply(a, found.transform).keys() == a.keys()
    found = ok.match(a, {"x": a["x"], "z": {"offset": a["y"]["bias"]}})
    assert [(p.theirs.pattern, p.sure) for p in found.pairs if p.ours.pattern == "y/bias"] == [("z/offset", "likely")]


def test_other_dtypes_are_never_certain_and_the_cast_is_named():
    a, b = {"x": np.zeros((3, 4), np.float32)}, {"x": np.zeros((3, 4), np.float16)}
    found = ok.match(a, b)
    assert [pair.sure for pair in found.pairs] == ["likely"]
    assert "ok.cast({'x': 'float16'})" in str(found)
    assert "its dtype differs" in str(ok.match(a, b, values=True))


def test_tied_weights_are_told_by_name():
    w = np.ones((5, 3), np.float32)
    found = ok.match({"emb": w, "head": w}, {"emb": w, "out": w}, values=True)
    assert not found.pairs
    assert [(o.ours, o.candidates) for o in found.open] == [("emb", ("emb", "out")), ("head", ("emb", "out"))]


def test_descriptions_have_no_values_to_compare():
    tree = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
    assert ok.match(tree, tree).pairs
    with pytest.raises(ok.OrbaxkitError, match="no values to compare"):
        ok.match(tree, tree, values=True)


@pytest.mark.parametrize(
    "tree", [{}, {"step": 3}, {"empty": np.zeros((0, 3))}], ids=["empty", "scalars", "no elements"]
)
def test_little_trees(tree):
    found = ok.match(tree, tree)
    assert not found.open
    assert not found.only_in_a
    assert str(found)


def test_what_is_left_over_and_in_the_way_is_dropped():
    a, b = {"x": np.zeros(2), "y": np.arange(3.0)}, {"x": np.arange(3.0)}
    found = ok.match(a, b, values=True)
    assert not ok.diff(ok.apply(a, found.transform), b, values=True)


def test_optimizer_slots_follow_their_params():
    params = {"head": {"kernel": np.ones((5, 2), np.float32)}}
    other = {"head": {"weight": np.ones((2, 5), np.float32)}}
    a, b = ({"params": p, "opt_state": optax.adam(1e-3).init(jax.tree.map(jnp.asarray, p))} for p in (params, other))
    found = ok.match(a, b)
    assert len(found.following) == 2
    assert not ok.diff(ok.apply(a, found.transform), b)


@pytest.mark.parametrize("values", [False, True], ids=["specs", "values"])
def test_thousands_of_leaves_of_one_size_take_seconds(values: bool):
    names = [np.base_repr(7919 * k + 50000, 36) for k in range(1500)]
    rng = np.random.default_rng(0)
    a = {name: rng.random((4, 4), np.float32) for name in names}
    b = {f"{name}/x": x for name, x in a.items()} if values else {f"m{name}": x for name, x in a.items()}
    start = time.monotonic()
    ok.match(a, b, values=values)
    assert time.monotonic() - start < 20
