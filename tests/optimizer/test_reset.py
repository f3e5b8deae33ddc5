"""A fresh optimizer for old params, whole or in part; moments and counts are never parted in silence."""

import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import f1_tree, save
from optimizer.zoo import ALIASES, PARAMS, train

import orbaxkit as ok

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, 0.1)


def at_100(tx: Any) -> dict[str, Any]:
    """Params, a state in which every count is 100 and every moment 0.5, and step 100."""
    state = jax.tree.map(lambda x: jnp.full_like(x, 100 if x.dtype == jnp.int32 else 0.5), tx.init(PARAMS))
    return {"params": PARAMS, "opt_state": state, "step": 100}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> ok.Checkpoint:
    """A34: Adam under a schedule, both counts 100."""
    return ok.open(save(tmp_path_factory.mktemp("a34") / "c", at_100(optax.adam(SCHEDULE))))


@pytest.mark.parametrize("name", ["adam", "adafactor", "rprop", "adagrad", "yogi", "lbfgs", "novograd", "sm3"])
def test_a_reset_state_is_that_of_tx_init(tmp_path: Path, name: str):
    """Also where the state starts at something else than zero."""
    params, state, _ = train(ALIASES[name], name)
    path = save(tmp_path / "c", {"params": params, "opt_state": state, "step": 3})
    state = ok.reset_optimizer(path, ALIASES[name])
    assert state["step"] == 0
    chex.assert_trees_all_equal(state["params"], params)
    chex.assert_trees_all_equal(state["opt_state"], ALIASES[name].init(params))
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(ALIASES[name].init(params))


def test_the_old_moments_stay_unread(tmp_path: Path):
    path = save(tmp_path / "c", f1_tree(), use_ocdbt=False)
    for folder in [*path.glob("opt_state.*.mu.*"), *path.glob("opt_state.*.nu.*")]:
        for chunk in folder.iterdir():
            if not chunk.name.startswith(".z"):
                chunk.unlink() if chunk.is_file() else shutil.rmtree(chunk)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert ok.reset_optimizer(path, tx, keep="step")["step"] == 3
    with pytest.raises(ok.CheckpointError, match="missing"):
        ok.rebuild_opt_state(path, tx)


def test_a_checkpoint_without_an_optimizer_gets_one(tmp_path: Path):
    path = save(tmp_path / "c", {"params": PARAMS})
    state = ok.reset_optimizer(path, optax.adam(1e-3))
    chex.assert_trees_all_equal(state["opt_state"], optax.adam(1e-3).init(PARAMS))


def test_train_state_keeps_step_and_schedule(scheduled: ok.Checkpoint):
    from flax.training.train_state import TrainState

    tx = optax.adam(SCHEDULE)
    target = TrainState.create(apply_fn=None, params=jax.tree.map(np.zeros_like, PARAMS), tx=tx)
    state = ok.reset_optimizer(scheduled, tx, target=target, keep=("step", "schedule"))
    assert isinstance(state, TrainState)
    assert (state.step, int(state.opt_state[0].count), int(state.opt_state[1].count)) == (100, 0, 100)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state[0].mu))
    chex.assert_trees_all_equal(state.params, PARAMS)


def test_A34_only_the_schedule_starts_again(scheduled: ok.Checkpoint):
    state = ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), only="schedule")
    adam, schedule = state["opt_state"]
    assert (state["step"], int(adam.count), int(schedule.count)) == (100, 100, 0)
    assert all(np.all(leaf == 0.5) for leaf in jax.tree.leaves((adam.mu, adam.nu)))


PARTED = {
    "moments": ({"only": ("mu", "nu")}, "opt_state/0/count: is kept, from the start begin mu, nu"),
    "second-moment": ({"only": "nu"}, "opt_state/0/count: is kept, from the start begin nu"),
    "count": ({"only": "adam/count"}, "opt_state/0/count: starts again, kept are mu, nu"),
    "kept-moments": ({"keep": ("mu", "nu")}, "opt_state/0/count: starts again, kept are mu, nu"),
}


@pytest.mark.parametrize(("choice", "message"), PARTED.values(), ids=PARTED)
def test_A34_counts_and_moments_are_not_parted(scheduled: ok.Checkpoint, choice: dict[str, Any], message: str):
    with pytest.raises(ok.TargetError) as error:
        ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), **choice)
    assert message in str(error.value)
    assert "allow_bias_mismatch=True" in str(error.value)
    ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), **choice, allow_bias_mismatch=True)


def test_A34_first_steps_after_a_mismatch(tmp_path: Path):
    """What the error protects from: gradient 0.5, and steps far from the ±1 of a fresh Adam."""
    tx = optax.scale_by_adam()
    params = {"w": np.zeros(1, np.float32)}
    state = optax.ScaleByAdamState(jnp.asarray(100, jnp.int32), {"w": jnp.full(1, 0.5)}, {"w": jnp.full(1, 0.25)})
    path = save(tmp_path / "c", {"params": params, "opt_state": state})
    step = {}
    for only in ("count", ("mu", "nu")):
        fresh = ok.reset_optimizer(path, tx, only=only, allow_bias_mismatch=True)["opt_state"]
        step[only] = float(tx.update({"w": jnp.full(1, 0.5)}, fresh)[0]["w"][0])
    assert step["mu", "nu"] == pytest.approx(0.98039, abs=1e-4)
    assert step["count"] == pytest.approx(0.31623, abs=1e-4)


def test_a_whole_state_starts_again_by_its_name(scheduled: ok.Checkpoint):
    adam, schedule = ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), only="adam")["opt_state"]
    assert (int(adam.count), int(schedule.count)) == (0, 100)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(adam))


def test_new_head_starts_again_and_the_rest_goes_on(scheduled: ok.Checkpoint):
    """A head of another shape: its params are the target's, its moments zero, everything else comes along."""
    tx = optax.adam(SCHEDULE)
    head = {"kernel": np.full((4, 7), 3, np.float32), "bias": np.zeros(7, np.float32)}
    params = {**PARAMS, "out": head}
    target = {"params": params, "opt_state": tx.init(params), "step": 0}
    state = ok.reset_optimizer(scheduled, tx, target=target, only="params/out/**")
    np.testing.assert_array_equal(state["params"]["out"]["kernel"], head["kernel"])
    mu = state["opt_state"][0].mu
    assert mu["out"]["kernel"].shape == (4, 7)
    assert not np.any(mu["out"]["kernel"])
    assert np.all(mu["hidden"]["kernel"] == 0.5)
    assert (state["step"], int(state["opt_state"][0].count)) == (100, 100)
    with pytest.raises(ok.TargetError, match="params/out/kernel: shape: found") as error:
        ok.reset_optimizer(scheduled, tx, target=target)
    assert 'on_shape_mismatch="keep"' in str(error.value)


def test_averaged_params_come_back_where_they_are_named(tmp_path: Path):
    ema = jax.tree.map(lambda x: x * 2, PARAMS)
    tx = optax.sgd(0.1, momentum=0.9)
    path = save(tmp_path / "c", {"params": PARAMS, "ema_params": ema, "opt_state": tx.init(PARAMS), "step": 7})
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    target = {"params": zeros, "ema_params": zeros, "opt_state": tx.init(zeros), "step": 0}
    chex.assert_trees_all_equal(ok.reset_optimizer(path, tx, target=target)["ema_params"], zeros)
    chex.assert_trees_all_equal(ok.reset_optimizer(path, tx, target=target, keep="ema")["ema_params"], ema)


def test_moments_lie_where_their_params_do(tmp_path: Path, scheduled: ok.Checkpoint):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    tx = optax.adam(SCHEDULE)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))

    def sharding(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, "model") if x.ndim == 2 else PartitionSpec())

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), PARAMS)
    target = {"params": params, "opt_state": jax.eval_shape(tx.init, params), "step": 0}
    state = ok.reset_optimizer(scheduled, tx, target=target, keep="schedule")
    for tree in (state["params"], state["opt_state"][0].mu, state["opt_state"][0].nu):
        assert jax.tree.all(jax.tree.map(lambda x: x.sharding == sharding(x), tree))


def test_words_that_mean_nothing_are_errors(scheduled: ok.Checkpoint):
    with pytest.raises(ok.TargetError, match="nux: means nothing") as error:
        ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), only="nux")
    assert "adam, schedule, count, mu, nu" in str(error.value)


def test_a_target_of_another_tx_is_an_error(scheduled: ok.Checkpoint):
    target = {"params": PARAMS, "opt_state": optax.adam(1e-3).init(PARAMS), "step": 0}
    with pytest.raises(ok.TargetError, match="the target's optimizer state is not that of tx") as error:
        ok.reset_optimizer(scheduled, optax.adam(SCHEDULE), target=target)
    assert error.value.leaves == (("opt_state/1/count", "tx has it, the target not"),)
