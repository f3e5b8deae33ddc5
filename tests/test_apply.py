"""Transforms on arrays in memory: the same containers, the same bits, jitted kernels for jax arrays."""

from typing import NamedTuple

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import orbaxkit as ok


def layers(xp=jnp):
    return {"w": xp.arange(24, dtype=xp.float32).reshape(2, 3, 4), "b": xp.arange(6, dtype=xp.float32).reshape(2, 3)}


@pytest.mark.parametrize("xp", [jnp, np], ids=["jax", "numpy"])
def test_unstack_and_stack_are_inverse(xp):
    tree = {"params": {"layers": layers(xp), "head": xp.ones(2)}}
    unstacked = ok.apply(tree, ok.unstack("params/layers", into="layers_{i}", axis=1))
    assert sorted(unstacked["params"]) == ["head", "layers_0", "layers_1", "layers_2"]
    np.testing.assert_array_equal(unstacked["params"]["layers_1"]["w"], [[4, 5, 6, 7], [16, 17, 18, 19]])  # A40
    assert unstacked["params"]["head"] is tree["params"]["head"]
    restacked = ok.apply(unstacked, ok.stack("params/layers_{i}", into="layers", axis=1))
    chex.assert_trees_all_equal(restacked, tree)
    assert all(isinstance(leaf, jax.Array if xp is jnp else np.ndarray) for leaf in jax.tree.leaves(unstacked))


def test_frozen_dicts_stay_frozen():
    tree = FrozenDict({"params": {"layers": layers()}})
    assert isinstance(ok.apply(tree, ok.unstack("params/layers", into="layers_{i}", axis=0)), FrozenDict)


class Pair(NamedTuple):
    first: dict
    second: list


def test_containers_with_fixed_fields_keep_their_type_or_refuse():
    tree = Pair({"layers": layers()}, [jnp.ones(1), jnp.ones(2)])
    changed = ok.apply(tree, ok.unstack("first/layers", into="layers_{i}", axis=0))
    assert isinstance(changed, Pair)
    assert list(changed.first) == ["layers_0", "layers_1"]
    assert changed.second == tree.second
    with pytest.raises(ok.TargetError, match="first: would have no leaves"):
        ok.apply(tree, ok.drop("first/**"))


def test_moved_subtrees_keep_their_containers():
    state = optax.adam(1e-3).init({"w": jnp.ones(2)})
    moved = ok.apply({"a": state}, ok.rename({"a/**": "b/c/**"}))
    assert jax.tree.structure(moved["b"]["c"]) == jax.tree.structure(state)


def test_train_state():
    state = TrainState.create(apply_fn=print, params={"layers": layers()}, tx=optax.sgd(0.1))
    changed = ok.apply(state, ok.unstack("params/layers", into="layers_{i}", axis=0))
    assert isinstance(changed, TrainState)
    assert (changed.apply_fn, list(changed.params)) == (print, ["layers_0", "layers_1"])


def test_int_keys_stay_numbers():
    tree = {"layers": {0: jnp.zeros(2), 1: jnp.ones(2), 10: jnp.ones(2)}}
    changed = ok.apply(tree, ok.rename({"layers/10": "layers/2"}))
    assert list(changed["layers"]) == [0, 1, 2]


class Scanned(nnx.Module):
    def __init__(self):
        self.layers = (
            nnx.Dict(w=nnx.Param(jnp.ones((2, 3)))) if hasattr(nnx, "Dict") else {"w": nnx.Param(jnp.ones((2, 3)))}
        )


def test_nnx_state_stays_a_state_of_params():
    state = nnx.state(Scanned())
    changed = ok.apply(state, ok.unstack("layers", into="layers_{i}", axis=0))
    assert isinstance(changed, nnx.State)
    assert isinstance(changed["layers_1"]["w"], nnx.Param)
    assert changed["layers_1"]["w"][...].shape == (3,)


def test_a_box_whose_axes_are_named_is_not_bent():
    tree = {"w": nn.Partitioned(jnp.ones((2, 3)), names=("layers", "model"))}
    for transform in (ok.unstack("w", into="w_{i}", axis=0), ok.transpose("w/value")):
        with pytest.raises(ok.TargetError, match="its box names"):
            ok.apply(tree, transform)
    assert ok.apply(tree, ok.cast("bfloat16"))["w"].names == ("layers", "model")


@flax.struct.dataclass
class Struct:
    x: jax.Array


@pytest.mark.parametrize(
    "tree",
    [
        {"x": jnp.ones(2)},
        [jnp.ones(2), (jnp.ones(1), {"a": 3})],
        Struct(jnp.ones(2)),
        {"k": jax.random.key(0), "s": "text", "n": None},
    ],
    ids=["dict", "lists", "struct", "key, string and None"],
)
def test_nothing_applied_is_the_identity(tree):
    same = ok.apply(tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True))


def test_descriptions_give_descriptions():
    tree = jax.eval_shape(lambda: {"layers": layers()})
    changed = ok.apply(tree, ok.unstack("layers", into="layers_{i}", axis=0), ok.cast("bfloat16"))
    assert changed["layers_0"]["w"] == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)


def test_keys_unstack():
    keys = jax.random.split(jax.random.key(0), 3)
    changed = ok.apply({"keys": keys}, ok.unstack("keys", into="key_{i}", axis=0))
    assert changed["key_2"] == keys[2]


def test_copies_that_differ_are_refused():
    same = {"w": jnp.ones((4, 2))}
    assert ok.apply(same, ok.unreplicate("w"))["w"].shape == (2,)
    with pytest.raises(ok.TransformError, match="copy 3"):
        ok.apply({"w": same["w"].at[3, 0].set(2)}, ok.unreplicate("w"))


def test_an_nnx_variable_with_a_sharding_is_not_bent():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("layers", "model"))
    with jax.set_mesh(mesh):
        state = nnx.State({"w": nnx.Param(jnp.ones((2, 3)), out_sharding=("layers", "model"))})
        with pytest.raises(ok.TargetError, match="its box names"):
            ok.apply(state, ok.unstack("w", into="w_{i}", axis=0))


def test_arrays_on_different_devices_are_not_joined():
    first, second = jax.devices()[:2]
    tree = {"a_0": jax.device_put(jnp.ones(2), first), "a_1": jax.device_put(jnp.ones(2), second)}
    with pytest.raises(ok.TransformError, match=r"arrays on devices \[0\] and \[1\]"):
        ok.apply(tree, ok.stack("a_{i}", into="a"))


def test_inside_a_context_with_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(
            np.arange(16, dtype=np.float32).reshape(8, 2),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
        )
        layer = ok.apply({"w": x}, ok.unstack("w", into="w_{i}", axis=0))["w_7"]
    np.testing.assert_array_equal(layer, [14, 15])
    assert layer.sharding.mesh == mesh


def test_an_index_and_a_key_of_the_same_text_are_one_place(tmp_path):
    tree = {"w": np.zeros((2, 3)), "a": np.ones(1), "b": np.full(1, 2.0)}
    into_layers = ok.rename({"w/{i}": "layers/{i}/w", "a": "layers/0/a", "b": "layers/1/b"})
    rules = (ok.unstack("w", into="w/{i}", axis=0), into_layers)
    ok.convert(tree, tmp_path / "c")
    for made in (ok.apply(tree, *rules), ok.restore(tmp_path / "c", *rules)):
        layers = made["layers"]
        layers = list(layers.values()) if isinstance(layers, dict) else layers
        assert [sorted(layer) for layer in layers] == [["a", "w"], ["b", "w"]]
