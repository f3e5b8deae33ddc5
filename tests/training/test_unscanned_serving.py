"""A model trained with its layers scanned; the one without a scan serves the same, and trains on the same."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from training.models import batch, cross_entropy, digits, linen_step, nnx_joint_step

import orbaxkit as ok

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(16, name="dense")(nn.relu(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(10, name="head")(blocks(name="blocks")(nn.Dense(16, name="stem")(x), None)[0])


class Unscanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(16, name="stem")(x)
        for i in range(3):
            x, _ = Block(name=f"block_{i}")(x, None)
        return nn.Dense(10, name="head")(x)


SCANNED, UNSCANNED = Scanned(), Unscanned()


@cache
def new_state(model: nn.Module) -> TrainState:
    params = jax.jit(model.init)(jax.random.key(0), digits()[0][:1])["params"]
    return jax.device_put(TrainState.create(apply_fn=model.apply, params=params, tx=TX), jax.devices()[0])


def linen(run: Path) -> tuple[TrainState, jax.Array, TrainState]:
    """The scanned state as trained, what the unscanned model serves, and its state to go on with."""
    state = new_state(SCANNED)
    for i in range(10):
        state, _ = linen_step(state, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, state)

    unstack = ok.unstack("params/blocks", into="block_{i}", axis=0)
    served = ok.restore(run, ok.select("params/**"), unstack)
    logits = UNSCANNED.apply(served, batch(99)[0])
    return state, logits, ok.restore(run, unstack, target=new_state(UNSCANNED))


def by_hand(tree: Any) -> Any:
    """A tree that mirrors the params, with its layers indexed one by one."""
    layers = {f"block_{i}": jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(3)}
    return {name: leaf for name, leaf in tree.items() if name != "blocks"} | layers


@pytest.fixture(scope="module")
def linen_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    run = tmp_path_factory.mktemp("linen") / "run"
    return run, linen(run)


def test_linen_serves_and_trains_on(linen_run: tuple[Path, Any]):
    scanned, logits, state = linen_run[1]
    np.testing.assert_allclose(logits, scanned.apply_fn({"params": scanned.params}, batch(99)[0]), atol=1e-5)

    clip, (adam, scale) = scanned.opt_state
    adam = adam._replace(mu=by_hand(adam.mu), nu=by_hand(adam.nu))
    expected = state.replace(step=scanned.step, params=by_hand(scanned.params), opt_state=(clip, (adam, scale)))
    chex.assert_trees_all_equal(state, expected)
    for i in range(10, 20):
        state, loss = linen_step(state, *batch(i))
        expected, expected_loss = linen_step(expected, *batch(i))
        scanned, scanned_loss = linen_step(scanned, *batch(i))
        assert float(loss) == float(expected_loss)
        np.testing.assert_allclose(loss, scanned_loss, rtol=1e-3)
    chex.assert_trees_all_equal(state, expected)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dense(nnx.relu(x))


class NnxScanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.head = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block: NnxBlock, x: jax.Array) -> jax.Array:
            return block(x)

        return self.head(forward(self.blocks, self.stem(x)))


class NnxUnscanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.head = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_model_and_optimizer(run: Path) -> tuple[Any, jax.Array, Any]:
    """The scanned model and optimizer as trained, what the unscanned model serves, and one with its optimizer."""
    trained = nnx.ModelAndOptimizer(NnxScanned(nnx.Rngs(0)), TX)
    for i in range(10):
        nnx_joint_step(trained, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, nnx.state(trained))

    unstack, served = ok.unstack("model/blocks", into="blocks/{i}", axis=0), NnxUnscanned(nnx.Rngs(1))
    nnx.update(served, ok.restore(run, ok.select("model/**"), unstack, target={"model": nnx.state(served)})["model"])
    other = nnx.ModelAndOptimizer(NnxUnscanned(nnx.Rngs(1)), TX)
    nnx.update(other, ok.restore(run, unstack, target=nnx.state(other)))
    return trained, served(batch(99)[0]), other


def test_nnx_serves_and_trains_on(tmp_path: Path):
    trained, logits, other = nnx_model_and_optimizer(tmp_path / "run")
    np.testing.assert_allclose(logits, trained.model(batch(99)[0]), atol=1e-5)
    scanned, unscanned = (nnx.to_pure_dict(nnx.state(x)) for x in (trained, other))
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *unscanned["model"]["blocks"].values())
    chex.assert_trees_all_equal(unscanned["model"] | {"blocks": stacked}, scanned["model"])
    for field in ("mu", "nu"):
        before, after = (state["opt_state"][1][0][field] for state in (scanned, unscanned))
        stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *after["blocks"].values())
        chex.assert_trees_all_equal(after | {"blocks": stacked}, before)
    for i in range(10, 20):
        loss, expected = nnx_joint_step(other, *batch(i)), nnx_joint_step(trained, *batch(i))
        np.testing.assert_allclose(loss, expected, rtol=1e-3)
    assert int(other.step[...]) == 20


# Haiku's `layer_stack` of a linear layer, as one would name it.
STACK, LAYER = "stack/~/linear", "block_{i}/~/linear"


def forward(params: Any, x: Any, layers: Callable[[Any, Any], Any]) -> Any:
    x = layers(params, x @ params["stem"]["w"])
    return x @ params["head"]["w"]


def scan_layers(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, layer: (x + jax.nn.relu(x) @ layer["w"], None), x, params[STACK])[0]


def loop_layers(params: Any, x: Any) -> Any:
    for i in range(3):
        x = x + jax.nn.relu(x) @ params[LAYER.format(i=i)]["w"]
    return x


@jax.jit
def scan_step(params: Any, opt_state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    grads = jax.grad(lambda p: cross_entropy(forward(p, x, scan_layers), y))(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@jax.jit
def loop_step(params: Any, opt_state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    grads = jax.grad(lambda p: cross_entropy(forward(p, x, loop_layers), y))(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def haiku(run: Path) -> tuple[Any, Any, Any]:
    """Params and state as trained, scanned; both to go on with, unscanned; what the unscanned model serves."""
    rng, shapes = np.random.default_rng(0), {"stem": (64, 16), STACK: (3, 16, 16), "head": (16, 10)}
    params = {name: {"w": rng.normal(0, 0.2, shape).astype(np.float32)} for name, shape in shapes.items()}
    opt_state = TX.init(params)
    for i in range(10):
        params, opt_state = scan_step(params, opt_state, *batch(i))
    ocp.PyTreeCheckpointer().save(run, {"params": params, "opt_state": opt_state})

    # A quoted key is literal, so the names with slashes come from a function.
    rename = ok.rename(lambda path: re.sub(r"block_(\d+)", r'"block_\1/~/linear"', path))
    unstack = ok.chain(ok.unstack(f'params/"{STACK}"', into="block_{i}", axis=0), rename)
    served = ok.restore(run, unstack, ok.select("params/**"))["params"]
    target = {"params": served, "opt_state": jax.eval_shape(TX.init, served)}
    state = ok.restore(run, unstack, target=target)
    return (params, opt_state), (state["params"], state["opt_state"]), forward(served, batch(99)[0], loop_layers)


def test_haiku_serves_and_trains_on(tmp_path: Path):
    scanned, unscanned, logits = haiku(tmp_path / "run")
    np.testing.assert_allclose(logits, forward(scanned[0], batch(99)[0], scan_layers), atol=1e-5)
    assert jax.tree.structure(unscanned[1]) == jax.tree.structure(TX.init(unscanned[0]))
    for i in range(3):
        for before, after in zip(mirrors(scanned), mirrors(unscanned), strict=True):
            np.testing.assert_array_equal(after[LAYER.format(i=i)]["w"], before[STACK]["w"][i])
    for i in range(10, 20):
        scanned, unscanned = scan_step(*scanned, *batch(i)), loop_step(*unscanned, *batch(i))
    np.testing.assert_allclose(unscanned[0]["head"]["w"], scanned[0]["head"]["w"], atol=1e-3)


def mirrors(run: tuple[Any, Any]) -> list[Any]:
    """The params, and what of the state looks like them."""
    params, (_, (adam, _)) = run
    return [params, adam.mu, adam.nu]


@pytest.mark.parametrize("keep", ["step", ("step", "adam")])
def test_an_unscanned_checkpoint_on_disk_resets_or_goes_on(tmp_path: Path, linen_run: tuple[Path, Any], keep: Any):
    """Converted once, the checkpoint is one of the unscanned model."""
    run, (scanned, _, state) = linen_run
    ok.convert(run, tmp_path / "unscanned", ok.unstack("params/blocks", into="block_{i}", axis=0))
    reset = ok.reset_optimizer(tmp_path / "unscanned", TX, target=new_state(UNSCANNED), keep=keep)
    opt_state = TX.init(state.params) if keep == "step" else state.opt_state
    chex.assert_trees_all_equal(reset, state.replace(opt_state=opt_state))
    assert int(reset.step) == int(scanned.step) == 10
