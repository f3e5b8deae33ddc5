"""Moments and counts move to another optimizer by what they are."""

import logging
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import save
from optimizer.zoo import PARAMS, train

import orbaxkit as ok


def counted(tx: Any, params: Any = PARAMS) -> Any:
    """A state whose counts are 100 and whose moments are the params plus one, so that each is another."""
    state = tx.init(params)
    return jax.tree.map(lambda x: jnp.full_like(x, 100) if x.dtype == jnp.int32 else x + 1, state)


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> ok.Checkpoint:
    return ok.open(
        save(tmp_path_factory.mktemp("adam") / "c", {"params": PARAMS, "opt_state": counted(optax.adam(1e-3))})
    )


TARGETS = {
    "adam": (optax.adam(1e-3), lambda s: s[0]),
    "adamw": (optax.adamw(1e-3), lambda s: s[0]),
    "clipped": (optax.chain(optax.clip(1.0), optax.adam(1e-3)), lambda s: s[1][0]),
    "scheduled": (optax.adam(optax.linear_schedule(0, 1, 10)), lambda s: s[0]),
    "injected": (optax.inject_hyperparams(optax.adam)(1e-3), lambda s: s.inner_state[0]),
    "named": (optax.named_chain(("adam", optax.adam(1e-3))), lambda s: s["adam"][0]),
    "accumulated": (optax.MultiSteps(optax.adam(1e-3), 4), lambda s: s.inner_opt_state[0]),
}


@pytest.mark.parametrize(("tx", "pick"), TARGETS.values(), ids=TARGETS)
def test_A33_the_one_adam_state_moves(adam: ok.Checkpoint, tx: Any, pick: Any):
    state = ok.migrate_opt_state(adam, tx)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
    moved = pick(state)
    assert int(moved.count) == 100
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves((moved.mu, moved.nu)))


def test_A33_a_new_schedule_counts_from_adam_or_from_the_argument(adam: ok.Checkpoint):
    tx = optax.adam(optax.linear_schedule(0, 1, 10))
    assert int(ok.migrate_opt_state(adam, tx)[1].count) == 100
    assert int(ok.migrate_opt_state(adam, tx, schedule_count=7)[1].count) == 7


def test_A33_to_lion_and_the_report(adam: ok.Checkpoint, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="orbaxkit"):
        state = ok.migrate_opt_state(adam, optax.lion(1e-3))
    assert isinstance(state[0], optax.ScaleByLionState)
    assert int(state[0].count) == 100
    (report,) = [r.getMessage() for r in caplog.records if "optimizer state moved" in r.getMessage()]
    assert "0 Lion <- opt_state/0; left behind: opt_state/0/nu" in report


def test_A33_lion_has_no_second_moment_for_adam(tmp_path: Path):
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": counted(optax.lion(1e-3))})
    with pytest.raises(ok.TargetError, match="0: nu would start again under the count of Lion"):
        ok.migrate_opt_state(path, optax.adam(1e-3))
    state = ok.migrate_opt_state(path, optax.adam(1e-3), allow_bias_mismatch=True)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state[0].nu))


def test_A33_two_candidates_are_an_error_that_sources_settles(tmp_path: Path):
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())
    first, second = counted(tx)
    second = second._replace(count=jnp.asarray(5, jnp.int32))
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": (first, second)})
    with pytest.raises(ok.TargetError, match="could continue any of opt_state/0, opt_state/1"):
        ok.migrate_opt_state(path, optax.scale_by_adam())
    moved = ok.migrate_opt_state(path, optax.adam(1e-3), sources={"0": "opt_state/1"})
    assert int(moved[0].count) == 5


def test_A33_no_candidate_is_an_error(adam: ok.Checkpoint):
    with pytest.raises(ok.TargetError, match="momentum: nothing stored has its moments"):
        ok.migrate_opt_state(adam, optax.sgd(0.1, momentum=0.9))
    fresh = ok.migrate_opt_state(adam, optax.sgd(0.1, momentum=0.9), on_missing="init")
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(fresh))


def frozen(tmp_path: Path) -> Path:
    """A32: adam on all params but one bias."""
    tx = optax.masked(optax.adam(1e-3), {"hidden": {"kernel": True, "bias": False}, "out": True})
    return save(tmp_path / "c", {"params": PARAMS, "opt_state": counted(tx)})


def test_A32_a_param_that_was_frozen_has_no_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, tx = frozen(tmp_path), optax.adam(1e-3)
    with pytest.raises(ok.TargetError, match="no moments for hidden/bias"):
        ok.migrate_opt_state(path, tx)
    everything = jax.tree.map(lambda _: True, PARAMS)
    with pytest.raises(ok.TargetError, match="no moments for hidden/bias") as error:
        ok.rebuild_opt_state(path, optax.masked(tx, everything))
    assert "on_missing=" in str(error.value)
    with caplog.at_level(logging.INFO, logger="orbaxkit"):
        state = ok.migrate_opt_state(path, tx, on_missing="init")
    assert "moments of hidden/bias start as tx.init makes them; the count is shared" in caplog.text
    assert not np.any(state[0].mu["hidden"]["bias"])
    assert np.all(state[0].mu["hidden"]["kernel"] == 1)
    assert int(state[0].count) == 100


def test_params_that_are_gone_are_named(adam: ok.Checkpoint):
    rest = {"hidden": PARAMS["hidden"]}
    with pytest.raises(ok.TargetError, match="out/bias: is not among the params") as error:
        ok.migrate_opt_state(adam, optax.adam(1e-3), rest)
    assert 'on_unexpected="ignore"' in str(error.value)
    state = ok.migrate_opt_state(adam, optax.adam(1e-3), rest, on_unexpected="ignore")
    assert list(state[0].mu) == ["hidden"]


def test_another_shape_is_an_error(adam: ok.Checkpoint):
    other = {**PARAMS, "out": {"kernel": np.zeros((4, 7), np.float32), "bias": np.zeros(7, np.float32)}}
    with pytest.raises(ok.TargetError, match="shape: found"):
        ok.migrate_opt_state(adam, optax.adam(1e-3), other)


def test_a_param_of_another_shape_starts_again_only_if_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tx = optax.adam(1e-3)
    params, state, _ = train(tx, "adam")
    path = save(tmp_path / "c", {"params": params, "opt_state": state, "step": 3})
    wider = params | {"out": jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 9)), params["out"])}
    with pytest.raises(ok.TargetError, match="shape: found") as error:
        ok.migrate_opt_state(path, tx, wider)
    assert 'on_shape_mismatch="init"' in str(error.value)
    with caplog.at_level("INFO", logger="orbaxkit"):
        (adam, _) = ok.migrate_opt_state(path, tx, wider, on_shape_mismatch="init")
    assert not np.any(adam.mu["out"]["kernel"])
    assert adam.mu["out"]["kernel"].shape[-1] == 9
    np.testing.assert_array_equal(adam.mu["hidden"]["kernel"], state[0].mu["hidden"]["kernel"])
    assert "out/kernel" in caplog.text
    assert "shared" in caplog.text


def test_a_step_of_a_run_is_chosen(tmp_path: Path):
    params, state, _ = train(optax.adam(1e-3), "adam")
    for step in (1, 2):
        save(tmp_path / "run" / str(step) / "default", {"params": params, "opt_state": state, "step": step})
    assert ok.reset_optimizer(tmp_path / "run", optax.adam(1e-3), keep="step", step=1)["step"] == 1
    chex.assert_trees_all_equal(ok.rebuild_opt_state(tmp_path / "run", optax.adam(1e-3), step=1), state)
    chex.assert_trees_all_equal(ok.migrate_opt_state(tmp_path / "run", optax.adam(1e-3), step=1), state)
