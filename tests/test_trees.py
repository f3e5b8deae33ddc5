"""Targets keep their containers."""

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

from orbaxkit.errors import TargetError
from orbaxkit.trees import as_leaf, flatten


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


@flax.struct.dataclass
class Struct:
    x: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="s")


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.tied = self.first


one = jnp.ones(2)
TREES = {
    "dict": {"b": one, "a": {"x": one}},
    "int keys": {0: one, 10: one, 2: one},
    "frozen": FrozenDict({"params": {"w": one}}),
    "namedtuple": Pair(one, one),
    "list and tuple": [one, (one, {"x": 3})],
    "struct": Struct(one),
    "chex": chex.dataclass(type("C", (), {"__annotations__": {"q": jax.Array}}))(q=one),
    "optax": optax.adam(1e-3).init({"w": one}),
    "boxed": {"w": nn.Partitioned(one, names=("data",)), "b": one},
    "none": {"a": None, "w": one},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_rebuild_is_the_identity(tree):
    target = flatten(tree)
    rebuilt = target.rebuild({name: leaf.value for name, leaf in target.leaves.items()})
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tree)
    chex.assert_trees_all_equal(rebuilt, tree)


def test_train_state_keeps_its_static_fields():
    state = TrainState.create(apply_fn=print, params={"w": one}, tx=optax.sgd(0.1))
    target = flatten(state)
    assert list(target.leaves) == ["step", "params/w"]
    rebuilt = target.rebuild({"step": 5, "params/w": one})
    assert (rebuilt.step, rebuilt.apply_fn, rebuilt.tx) == (5, print, state.tx)


def test_nnx_module_keeps_shared_variables_shared_and_the_original_untouched():
    model = Model(nnx.Rngs(0))
    target = flatten(model)
    assert set(target.leaves) == {"first/bias/value", "first/kernel/value"}
    rebuilt = target.rebuild({name: leaf.value * 0 + 7 for name, leaf in target.leaves.items()})
    assert isinstance(rebuilt, Model)
    assert rebuilt.tied is rebuilt.first
    assert float(rebuilt.first.bias[...][0]) == 7.0
    assert float(model.first.bias[...][0]) == 0.0


def test_boxes_are_told_from_keys_called_value():
    leaves = flatten({"box": nn.Partitioned(one, names=("x",)), "key": {"value": one}}).leaves
    assert [leaf.is_boxed for leaf in leaves.values()] == [True, False]


def test_foreign_leaves_are_named():
    with pytest.raises(TargetError, match="f: a builtin_function_or_method") as error:
        flatten({"f": print, "w": one})
    assert error.value.leaves == (("f", "a builtin_function_or_method"),)


def test_first_level_keys_include_empty_nodes_but_not_none():
    assert flatten({"a": (), "b": one, "c": None}).top_level == {"a", "b"}


@pytest.mark.parametrize(
    ("value", "wanted", "survives"),
    [
        (3, np.int32(0), True),
        (300, np.int8(0), False),
        (2**40, jnp.int32(0), False),
        (2.5, np.int32(0), False),
        (3.0, 0, True),
        (2.5, 0, False),
        (float("nan"), np.float32(0), True),
        (float("nan"), np.int32(0), False),
        (16777217, np.float32(0), False),
        (0.1, np.float32(0), False),
        (0.5, jnp.bfloat16(0), True),
        (True, False, True),
    ],
)
def test_numbers_survive_exactly_or_not_at_all(value, wanted, survives):
    (leaf,) = flatten([wanted]).leaves.values()
    if survives:
        got = as_leaf(value, leaf)
        assert np.array_equal(np.asarray(got, np.float64), np.asarray(value, np.float64), equal_nan=True)
    else:
        with pytest.raises((ValueError, OverflowError)):
            as_leaf(value, leaf)
