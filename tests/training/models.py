"""Handwritten digits, and one small network for them: in Linen, in NNX, as Haiku names it, in plain dicts."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,280 images of 8 by 8 pixels in [0, 1], and which digit each one shows."""
    images, labels = load_digits(return_X_y=True)
    return images[:1280].astype(np.float32) / 16, labels[:1280].astype(np.int32)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The 64 images of a step: the order depends on the step alone."""
    images, labels = digits()
    chosen = np.random.default_rng(step).permutation(len(images))[:64]
    return images[chosen], labels[chosen]


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LinenMlp(nn.Module):
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(32, name="trunk")(x)))


@cache
def _linen(classes: int) -> tuple[Callable[..., jax.Array], Callable[..., Any]]:
    model = LinenMlp(classes)
    return model.apply, jax.jit(model.init)


def linen_state(tx: Any, classes: int = 10, seed: int = 0) -> TrainState:
    apply, init = _linen(classes)
    params = init(jax.random.key(seed), digits()[0][:1])["params"]
    # Committed to a device, as what is restored is: one compilation serves both.
    return jax.device_put(TrainState.create(apply_fn=apply, params=params, tx=tx), jax.devices()[0])


@jax.jit
def linen_step(state: TrainState, x: Any, y: Any) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, x), y))(state.params)
    return state.apply_gradients(grads=grads), loss


class NnxMlp(nnx.Module):
    def __init__(self, classes: int = 10, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.trunk, self.head = nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.trunk(x)))


@nnx.jit
def nnx_step(model: NnxMlp, optimizer: nnx.Optimizer, x: Any, y: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def nnx_joint_step(optimizer: nnx.ModelAndOptimizer, x: Any, y: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(optimizer.model)
    optimizer.update(grads)
    return loss


class Names(NamedTuple):
    """Of the two layers of a model that is a function and its params nested dicts."""

    trunk: str
    head: str


DICTS = Names("trunk", "head")
HAIKU = Names("mlp/~/linear_0", "mlp/~/linear_1")  # what `hk.transform` makes of an `hk.nets.MLP`


def dict_params(names: Names, classes: int = 10, seed: int = 0) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    shapes = {names.trunk: (64, 32), names.head: (32, classes)}
    params = {
        name: {"w": rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32), "b": np.zeros(shape[1], np.float32)}
        for name, shape in shapes.items()
    }
    return jax.device_put(params, jax.devices()[0])


@cache
def dict_step(names: Names, tx: Any) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """One jitted step: (params, opt_state, x, y) -> (params, opt_state, loss)."""

    def loss_of(params: Any, x: Any, y: Any) -> jax.Array:
        trunk, head = params[names.trunk], params[names.head]
        return cross_entropy(jax.nn.relu(x @ trunk["w"] + trunk["b"]) @ head["w"] + head["b"], y)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step)
