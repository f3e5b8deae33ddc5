"""Every optimizer that optax exposes under a name, plain and wrapped, on a tiny model."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

PARAMS = {
    "hidden": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "bias": np.full(4, 0.1, np.float32)},
    "out": {"kernel": np.linspace(0.5, 1, 8, dtype=np.float32).reshape(4, 2), "bias": np.full(2, -0.1, np.float32)},
}
_ARGUMENTS = {
    "learning_rate": 0.01,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
    "key": jax.random.key(0),
}
# Deprecated; no optimizers by themselves; Orbax refuses to save GaLore's projectors of size zero.
_SKIPPED = {"optimistic_adam", "differentially_private_aggregate", "normalize", "galore"}


def _is_alias(name: str, value: Any) -> bool:
    if name in _SKIPPED or name.startswith(("_", "scale_by_")):
        return False
    required = [
        parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in (2, 4)
    ]
    makes = str(inspect.signature(value).return_annotation)
    return "GradientTransformation" in makes and set(required) <= set(_ARGUMENTS)


def _make(alias: Callable[..., Any]) -> Any:
    known = inspect.signature(alias).parameters
    needed = [name for name in _ARGUMENTS if name in known and known[name].default is inspect.Parameter.empty]
    keys = [name for name in ("key",) if name in known]  # deprecated to leave out
    with warnings.catch_warnings():  # dpsgd passes a deprecated seed on
        warnings.simplefilter("ignore", DeprecationWarning)
        return alias(**{name: _ARGUMENTS[name] for name in [*needed, *keys]})


# `optax._src.alias` holds the optimizers of the main package; those of contrib lie in modules of their own.
_MAIN = inspect.getmembers(optax, inspect.isfunction)
ALIASES = {name: _make(f) for name, f in _MAIN if f.__module__.endswith(".alias") and _is_alias(name, f)}
CONTRIB = {
    f"contrib_{name}": _make(f)
    for name, f in inspect.getmembers(optax.contrib, inspect.isfunction)
    if _is_alias(name, f)
}
PLAIN = ALIASES | CONTRIB


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "a" if path[0].key == "hidden" else "b", params)


_MASK = {"hidden": {"kernel": True, "bias": False}, "out": {"kernel": True, "bias": True}}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, _MASK),
    "partitioned": lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, _labels),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "named": lambda tx: optax.named_chain(("zz_clip", optax.clip(1.0)), ("inner", tx)),
}


def loss(params: Any) -> jax.Array:
    """A small MLP's loss on fixed data."""
    x = jnp.linspace(-1, 1, 15).reshape(5, 3)
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - 0.5) ** 2)


def make_step(tx: Any, name: str = "") -> Callable[[Any, Any], tuple[Any, Any]]:
    """One jitted training step: (params, state) -> (params, state)."""
    update = optax.with_extra_args_support(tx).update

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(params)
        if "dpsgd" in name:  # takes one gradient for each example
            grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
        extra = {"value": value, "grad": grads, "value_fn": loss}
        if "sophia" in name:
            extra = {"obj_fn": loss}
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def train(tx: Any, name: str = "", steps: int = 3) -> tuple[Any, Any, Callable[[Any, Any], tuple[Any, Any]]]:
    """Params and state after some steps, and the step."""
    # Committed to a device, as what is restored is: one compilation serves both.
    params = jax.device_put(PARAMS, jax.devices()[0])
    state, step = jax.device_put(tx.init(params), jax.devices()[0]), make_step(tx, name)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state, step


def scrambled(state: Any, seed: int) -> Any:
    """A state with other values in every leaf, so that no two leaves can be mistaken for each other."""
    rng = np.random.default_rng(seed)

    def value(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), leaf.size).reshape(leaf.shape)
        return np.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(value, jax.eval_shape(lambda: state))
