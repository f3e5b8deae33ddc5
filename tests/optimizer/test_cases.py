"""Resetting an optimizer and moving its state to another one: the cases that people hit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import save

import orbaxkit as ok

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def trained(tx: optax.GradientTransformation, params=PARAMS, steps: int = 3):
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def saved(path, tx, **options):
    params, state = trained(tx, **options)
    return save(path, {"params": params, "opt_state": state, "step": 3}), params, state


def test_A32_moments_for_a_param_that_was_frozen(tmp_path):
    tx = optax.adam(1e-3)
    _, state = trained(tx, {"w": PARAMS["w"]})
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": state, "step": 3})
    with pytest.raises(ok.TargetError, match="b"):
        ok.migrate_opt_state(path, tx, PARAMS)
    moved = ok.migrate_opt_state(path, tx, PARAMS, on_missing="init")
    np.testing.assert_array_equal(moved[0].mu["b"], np.zeros(3))
    np.testing.assert_array_equal(moved[0].mu["w"], state[0].mu["w"])
    assert int(moved[0].count) == 3


def test_A33_adam_moves_into_other_optimizers_by_role(tmp_path):
    path, params, state = saved(tmp_path / "c", optax.adam(1e-3))
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    for tx in (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), optax.adamw(1e-3), optax.adam(schedule)):
        moved = ok.migrate_opt_state(path, tx)
        assert jax.tree.structure(moved) == jax.tree.structure(tx.init(params))
        (adam,) = (s for s in jax.tree.leaves(moved, is_leaf=_is_adam) if _is_adam(s))
        np.testing.assert_array_equal(adam.nu["w"], state[0].nu["w"])
        assert int(adam.count) == 3
        _, _ = jax.jit(tx.update)(params, moved, params)
    (count,) = (s.count for s in jax.tree.leaves(moved, is_leaf=_is_schedule) if _is_schedule(s))
    assert int(count) == 3


def _is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def _is_schedule(node):
    return isinstance(node, optax.ScaleByScheduleState)


def test_reset_is_what_init_gives_and_keeps_what_is_named(tmp_path):
    tx = optax.adam(optax.cosine_decay_schedule(1e-3, 100))
    path, params, _ = saved(tmp_path / "c", tx)
    state = ok.reset_optimizer(path, tx)
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(tx.init(params))
    jax.tree.map(np.testing.assert_array_equal, state["opt_state"], tx.init(params))
    jax.tree.map(np.testing.assert_array_equal, state["params"], params)
    assert int(state["step"]) == 0
    kept = ok.reset_optimizer(path, tx, keep=("step", "schedule"))
    assert (int(kept["step"]), int(kept["opt_state"][1].count), int(kept["opt_state"][0].count)) == (3, 3, 0)


def test_A34_the_schedule_alone(tmp_path):
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, 0.1))
    path, _, state = saved(tmp_path / "c", tx, steps=5)
    reset = ok.reset_optimizer(path, tx, only="schedule")["opt_state"]
    assert (int(reset[1].count), int(reset[0].count)) == (0, 5)
    jax.tree.map(np.testing.assert_array_equal, reset[0], state[0])


def test_A34_counts_parted_from_their_moments_need_consent(tmp_path):
    tx = optax.adam(1e-3)
    path, _, state = saved(tmp_path / "c", tx)
    for only in ("mu", "nu", "adam/count"):
        with pytest.raises(ok.TargetError, match="allow_bias_mismatch"):
            ok.reset_optimizer(path, tx, only=only)
    reset = ok.reset_optimizer(path, tx, only="nu", allow_bias_mismatch=True)["opt_state"]
    np.testing.assert_array_equal(reset[0].nu["w"], np.zeros((2, 3)))
    np.testing.assert_array_equal(reset[0].mu["w"], state[0].mu["w"])
