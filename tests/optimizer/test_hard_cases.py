"""Trees that people have and that are easy to get wrong: two networks, NNX with statistics, odd states."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import save
from flax import nnx

import orbaxkit as ok

TX = optax.adam(1e-3)
W = jnp.ones((2, 3))


def filled(params, value: float):
    adam, rest = TX.init(params)
    return adam._replace(mu=jax.tree.map(lambda x: jnp.full_like(x, value), adam.mu)), rest


@pytest.fixture(scope="module")
def gan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two networks with the same names inside, each with its optimizer, under one key."""
    params = {"gen": {"d": {"w": W}}, "disc": {"d": {"w": W * 2}}}
    states = {"gen": filled(params["gen"], 10.0), "disc": filled(params["disc"], 20.0)}
    return save(tmp_path_factory.mktemp("gan") / "c", {"params": params, "opt_state": states, "step": 4})


def test_two_networks_keep_their_params_and_moments_apart(gan: Path):
    for name, value, moment in (("gen", 1.0, 10.0), ("disc", 2.0, 20.0)):
        state = ok.reset_optimizer(gan, TX, at=f"opt_state/{name}")
        np.testing.assert_array_equal(state["params"]["d"]["w"], np.full((2, 3), value))
        rebuilt = ok.rebuild_opt_state(gan, TX, at=f"opt_state/{name}")
        np.testing.assert_array_equal(rebuilt[0].mu["d"]["w"], np.full((2, 3), moment))
    assert set(ok.reset_optimizer(gan, TX)["params"]) == {"gen", "disc"}
    with pytest.raises(ok.CheckpointError, match="2 optimizer states") as error:
        ok.rebuild_opt_state(gan, TX)
    assert {path for path, _ in error.value.leaves} == {"opt_state/gen", "opt_state/disc"}


def test_a_named_chain_is_one_state(tmp_path: Path):
    tx = optax.named_chain(("clip", optax.clip(1.0)), ("adam", TX))
    params = {"adam": W, "clip": W}  # even where params are called as its parts
    path = save(tmp_path / "c", {"params": params, "opt_state": tx.init(params)})
    chex.assert_trees_all_equal(ok.rebuild_opt_state(path, tx, at="opt_state"), tx.init(params))


class Network(nnx.Module):
    """Params, statistics and PRNG states in one tree."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_an_nnx_target_says_which_of_its_leaves_are_trained(tmp_path: Path):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    path = save(tmp_path / "c", tree)
    state = ok.reset_optimizer(path, TX, target=tree)
    assert jax.tree.structure(state) == jax.tree.structure(tree)
    with pytest.raises(ok.TargetError, match=r"PRNG keys among the params(.|\n)*target="):
        ok.reset_optimizer(path, TX)


def trained(tx, params, **extra):
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, **extra)
    return state


@pytest.mark.parametrize(
    ("tx", "extra"),
    [(optax.optimistic_gradient_descent(0.1), {}), (optax.contrib.reduce_on_plateau(), {"value": jnp.float32(1.0)})],
    ids=["optimistic", "plateau"],
)
def test_moving_to_the_same_optimizer_changes_nothing(tmp_path: Path, tx, extra):
    params = {"w": W}
    state = trained(tx, params, **extra)
    path = save(tmp_path / "c", {"params": params, "opt_state": state})
    chex.assert_trees_all_equal(ok.migrate_opt_state(path, tx), state)


def test_hyperparameters_are_the_new_optimizers(tmp_path: Path):
    state = optax.inject_hyperparams(optax.adamw)(0.5).init({"w": W})
    path = save(tmp_path / "c", {"params": {"w": W}, "opt_state": state})
    moved = ok.migrate_opt_state(path, optax.inject_hyperparams(optax.adamw)(0.1))
    assert float(moved.hyperparams["learning_rate"]) == pytest.approx(0.1)


def test_a_field_that_starts_again_as_a_whole_is_told_from_its_count(tmp_path: Path):
    """Novograd's second moment is a number for each param: Adam's does not fit, whatever may start again."""
    path = save(tmp_path / "c", {"params": {"w": W}, "opt_state": trained(TX, {"w": W})})
    with pytest.raises(ok.TargetError, match="nu would start again under the count"):
        ok.migrate_opt_state(path, optax.novograd(1e-3), on_shape_mismatch="init")


def test_what_names_nothing_is_an_error(tmp_path: Path):
    path = save(tmp_path / "c", {"params": {"w": W}, "opt_state": TX.init({"w": W}), "step": "7"})
    with pytest.raises(ok.TargetError, match="1/0: is no state of tx"):
        ok.migrate_opt_state(path, TX, sources={"1/0": "opt_state/0"})
    with pytest.raises(ok.TargetError, match="with a tx nothing is"):
        ok.rebuild_opt_state(path, TX, assume={"opt_state/0": optax.ScaleByBeliefState})
    with pytest.raises(ok.TargetError, match="optax counts in int32"):
        ok.migrate_opt_state(path, optax.adam(optax.constant_schedule(1.0)), schedule_count=2**40)
    assert int(ok.reset_optimizer(path, TX)["opt_state"][0].count) == 0  # a step that is text is none


def test_the_step_that_is_kept_is_the_trees(tmp_path: Path):
    tx = optax.conditionally_transform(TX, lambda step, **_: step > 0)
    state = tx.init({"w": W})._replace(step=jnp.asarray(3))
    path = save(tmp_path / "c", {"params": {"w": W}, "opt_state": state, "step": 9})
    reset = ok.reset_optimizer(path, tx, keep="step")
    assert (int(reset["step"]), int(reset["opt_state"].step)) == (9, 0)


@pytest.mark.parametrize("to", ["float32", "bfloat16"])
def test_moments_keep_the_dtype_that_training_gave_them(tmp_path: Path, to: str):
    state = optax.adam(1e-3, mu_dtype=to).init({"w": W})
    path = save(tmp_path / "c", {"params": {"w": W}, "opt_state": state})
    other = optax.adam(1e-3, mu_dtype="float32" if to == "bfloat16" else "bfloat16")
    for made in (ok.rebuild_opt_state(path, other), ok.migrate_opt_state(path, other)):
        assert made[0].mu["w"].dtype == to
        jax.jit(other.update)({"w": W}, made, {"w": W})


def test_lookaheads_params_need_a_target(tmp_path: Path):
    tx = optax.lookahead(TX, 5, 0.5)
    params = optax.LookaheadParams.init_synced({"a": W})
    tree = {"params": params, "opt_state": tx.init(params)}
    path = save(tmp_path / "c", tree)
    with pytest.raises(ok.TargetError, match="init_synced"):
        ok.reset_optimizer(path, tx)
    assert jax.tree.structure(ok.reset_optimizer(path, tx, target=tree)) == jax.tree.structure(tree)
