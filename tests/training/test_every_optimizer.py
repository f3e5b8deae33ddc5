"""Small networks of Linen and NNX under every optimizer of optax: saved, rebuilt, they train on as if never saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from optimizer.zoo import ALIASES, PLAIN
from training.models import digits

import orbaxkit as ok

X, Y = digits()[0][:16], np.eye(10, dtype=np.float32)[digits()[1][:16]]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10, name="head")(nn.tanh(nn.Dense(4, name="trunk")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.trunk, self.head = nnx.Linear(64, 4, rngs=rngs), nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.tanh(self.trunk(x)))


LINEN = Linen()
LINEN_PARAMS = jax.jit(LINEN.init)(jax.random.key(0), X)["params"]
NNX_GRAPH, NNX_PARAMS = nnx.split(Nnx(nnx.Rngs(0)))
MODELS: dict[str, tuple[Any, Callable[[Any], jax.Array]]] = {
    "linen": (LINEN_PARAMS, lambda params: jnp.mean((LINEN.apply({"params": params}, X) - Y) ** 2)),
    "nnx": (NNX_PARAMS, lambda params: jnp.mean((nnx.merge(NNX_GRAPH, params)(X) - Y) ** 2)),
}


def is_trunk(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "trunk" in str(path[0]), params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda trunk: "slow" if trunk else "frozen", is_trunk(params))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, is_trunk),
    "multi_transform": lambda tx: optax.multi_transform({"slow": tx, "frozen": optax.set_to_zero()}, labels),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "named_chain": lambda tx: optax.named_chain(("zz_clip", optax.clip(1.0)), ("inner", tx)),
}
# Two kinds of counts; factored moments.
ADAMW = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=4)
WRAPPED = {f"{name}-adamw": wrap(ADAMW) for name, wrap in WRAPPERS.items()}
FACTORED = {f"{name}-adafactor": wrap(ADAFACTOR) for name, wrap in WRAPPERS.items()}
CASES = [("linen", name, tx) for name, tx in (PLAIN | WRAPPED | FACTORED).items()]
CASES += [("nnx", name, tx) for name, tx in (ALIASES | WRAPPED).items()]
# One compilation for each case is most of the time; optimized code would take twice as long to make.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_step(tx: Any, loss_of: Callable[[Any], jax.Array], name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One jitted training step: (params, state) -> (params, state)."""
    update = optax.with_extra_args_support(tx).update

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(params)
        extra = {"value": loss, "grad": grads, "value_fn": loss_of}
        if "dpsgd" in name:  # takes one gradient for each example
            grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
        if "sophia" in name:
            extra = {"obj_fn": loss_of}
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, compiler_options=UNOPTIMIZED)


def bits(tree: Any) -> list[Any]:
    """Dtype, shape and bytes of every leaf."""
    leaves = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
              for x in jax.tree.leaves(tree)]  # fmt: skip
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in leaves]


@pytest.mark.parametrize(("model", "name", "tx"), CASES, ids=[f"{model}-{name}" for model, name, _ in CASES])
def test_rebuilt_it_trains_on_as_if_never_saved(tmp_path: Path, model: str, name: str, tx: Any):
    params, loss_of = MODELS[model]
    params = like = jax.device_put(params, jax.devices()[0])
    state, step = jax.device_put(tx.init(params), jax.devices()[0]), make_step(tx, loss_of, name)
    for _ in range(3):
        params, state = step(params, state)
    ocp.PyTreeCheckpointer().save(tmp_path / "run", {"params": params, "opt_state": state})

    rebuilt = ok.rebuild_opt_state(tmp_path / "run", tx, like)
    restored = ok.restore_params(tmp_path / "run", target=like)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    assert bits((restored, rebuilt)) == bits((params, state))
    assert bits(step(restored, rebuilt)) == bits(step(params, state))
