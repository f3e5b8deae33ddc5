"""Pretrain, save, restore the params alone into a model with a new head, train on."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from training.models import (
    DICTS,
    HAIKU,
    Names,
    NnxMlp,
    batch,
    dict_params,
    dict_step,
    linen_state,
    linen_step,
    nnx_joint_step,
    nnx_step,
)

import orbaxkit as ok

ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
Told = tuple[Any, Any, Any, list[float]]  # params: saved, fresh, restored; losses


def linen(run: Path) -> Told:
    state = linen_state(ADAM, classes=10)
    for i in range(20):
        state, _ = linen_step(state, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, state)

    fresh = linen_state(SGD, classes=2, seed=1)  # from now on: is the digit odd?
    restored = ok.restore_params(run, target=fresh.params, on_shape_mismatch="keep")
    tuned, losses = fresh.replace(params=restored), []
    for i in range(20):
        x, y = batch(i)
        tuned, loss = linen_step(tuned, x, y % 2)
        losses.append(loss)
    return state.params, fresh.params, restored, losses


def nnx_optimizer(run: Path) -> Told:
    model = NnxMlp(classes=10)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    for i in range(20):
        nnx_step(model, optimizer, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})

    tuned = NnxMlp(classes=2, seed=1)
    fresh = nnx.to_pure_dict(nnx.state(tuned, nnx.Param))
    restored = ok.restore_params(run, target=nnx.state(tuned, nnx.Param), on_shape_mismatch="keep")
    nnx.update(tuned, restored)
    optimizer, losses = nnx.Optimizer(tuned, SGD, wrt=nnx.Param), []
    restored = nnx.to_pure_dict(nnx.state(tuned, nnx.Param))
    for i in range(20):
        x, y = batch(i)
        losses.append(nnx_step(tuned, optimizer, x, y % 2))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), fresh, restored, losses


def nnx_model_and_optimizer(run: Path) -> Told:
    trained = nnx.ModelAndOptimizer(NnxMlp(classes=10), ADAM)
    for i in range(20):
        nnx_joint_step(trained, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, nnx.state(trained))

    tuned = NnxMlp(classes=2, seed=1)
    fresh = nnx.to_pure_dict(nnx.state(tuned, nnx.Param))
    nnx.update(tuned, ok.restore_params(run, target=nnx.state(tuned, nnx.Param), on_shape_mismatch="keep"))
    restored = nnx.to_pure_dict(nnx.state(tuned, nnx.Param))
    optimizer, losses = nnx.ModelAndOptimizer(tuned, SGD), []
    for i in range(20):
        x, y = batch(i)
        losses.append(nnx_joint_step(optimizer, x, y % 2))
    return nnx.to_pure_dict(nnx.state(trained.model, nnx.Param)), fresh, restored, losses


def dicts(run: Path, names: Names = DICTS) -> Told:
    params, step = dict_params(names, classes=10), dict_step(names, ADAM)
    opt_state = ADAM.init(params)
    for i in range(20):
        params, opt_state, _ = step(params, opt_state, *batch(i))
    ocp.PyTreeCheckpointer().save(run, {"params": params, "opt_state": opt_state})

    fresh, losses = dict_params(names, classes=2, seed=1), []
    restored = tuned = ok.restore_params(run, target=fresh, on_shape_mismatch="keep")
    opt_state, step = SGD.init(tuned), dict_step(names, SGD)
    for i in range(20):
        x, y = batch(i)
        tuned, opt_state, loss = step(tuned, opt_state, x, y % 2)
        losses.append(loss)
    return params, fresh, restored, losses


def haiku(run: Path) -> Told:
    return dicts(run, HAIKU)


@pytest.mark.parametrize("job", [linen, nnx_optimizer, nnx_model_and_optimizer, dicts, haiku])
def test_the_trunk_is_the_saved_one_the_head_new_and_both_train_on(tmp_path: Path, job: Any):
    saved, fresh, restored, losses = job(tmp_path / "run")
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    for part in restored:
        expected = fresh if part in ("head", HAIKU.head) else saved
        jax.tree.map(np.testing.assert_array_equal, restored[part], expected[part])
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_a_head_of_another_shape_is_an_error_until_it_is_allowed(tmp_path: Path):
    dicts(tmp_path / "run")
    with pytest.raises(ok.TargetError, match='on_shape_mismatch="keep"') as error:
        ok.restore_params(tmp_path / "run", target=dict_params(DICTS, classes=2))
    assert [leaf for leaf, _ in error.value.leaves] == ["head/b", "head/w"]


def test_a_head_of_another_name_is_new_where_that_is_allowed(tmp_path: Path):
    saved = dicts(tmp_path / "run")[0]
    fresh = dict_params(DICTS._replace(head="parity"), classes=2)
    restored = ok.restore_params(tmp_path / "run", target=fresh, on_missing="keep", on_unexpected="ignore")
    jax.tree.map(np.testing.assert_array_equal, restored, {"trunk": saved["trunk"], "parity": fresh["parity"]})


def test_the_trunks_moments_go_on_where_only_the_head_starts_again(tmp_path: Path):
    linen(tmp_path / "run")
    fresh = linen_state(ADAM, classes=2, seed=1)
    state = ok.reset_optimizer(tmp_path / "run", ADAM, target=fresh, only="params/head/**")
    saved, (now, _) = ok.rebuild_opt_state(tmp_path / "run", ADAM)[0], state.opt_state
    assert int(state.step) == int(now.count) == 20
    for before, after, start in ((saved.mu, now.mu, fresh.opt_state[0].mu), (saved.nu, now.nu, fresh.opt_state[0].nu)):
        jax.tree.map(np.testing.assert_array_equal, after, {"trunk": before["trunk"], "head": start["head"]})
    x, y = batch(20)
    assert np.isfinite(linen_step(state, x, y % 2)[1])
