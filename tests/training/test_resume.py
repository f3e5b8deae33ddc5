"""Twenty steps, saved after ten by `ocp.CheckpointManager`; resumed, the other ten have the same losses bit for bit."""

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

Losses = tuple[list[Any], list[Any]]  # of the run that went on, and of the one that was resumed
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20)))


def linen(run: Path) -> Losses:
    state, losses = linen_state(TX), []
    with ocp.CheckpointManager(run) as manager:
        for i in range(20):
            if i == 10:
                manager.save(i, args=ocp.args.StandardSave(state))
            state, loss = linen_step(state, *batch(i))
            losses.append(loss)

    state, resumed = ok.restore(run, target=linen_state(TX, seed=1)), []
    for i in range(int(state.step), 20):
        state, loss = linen_step(state, *batch(i))
        resumed.append(loss)
    return losses[10:], resumed


def nnx_optimizer(run: Path) -> Losses:
    model, losses = NnxMlp(), []
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with ocp.CheckpointManager(run) as manager:
        for i in range(20):
            if i == 10:
                items = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
                args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
                manager.save(i, args=ocp.args.Composite(**args))
            losses.append(nnx_step(model, optimizer, *batch(i)))
        manager.wait_until_finished()

        model = NnxMlp(seed=1)
        optimizer, resumed = nnx.Optimizer(model, TX, wrt=nnx.Param), []
        state = ok.restore(manager, target={"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    nnx.update(model, state["model"])
    nnx.update(optimizer, state["optimizer"])
    for i in range(int(optimizer.step[...]), 20):
        resumed.append(nnx_step(model, optimizer, *batch(i)))
    return losses[10:], resumed


def nnx_model_and_optimizer(run: Path) -> Losses:
    trained, losses = nnx.ModelAndOptimizer(NnxMlp(), TX), []
    with ocp.CheckpointManager(run) as manager:
        for i in range(20):
            if i == 10:
                manager.save(i, args=ocp.args.StandardSave(nnx.state(trained)))
            losses.append(nnx_joint_step(trained, *batch(i)))

    trained, resumed = nnx.ModelAndOptimizer(NnxMlp(seed=1), TX), []
    nnx.update(trained, ok.restore(run, target=nnx.state(trained), step=10))
    for i in range(int(trained.step[...]), 20):
        resumed.append(nnx_joint_step(trained, *batch(i)))
    return losses[10:], resumed


def dicts(run: Path, names: Names = DICTS) -> Losses:
    params, step, losses = dict_params(names), dict_step(names, TX), []
    opt_state = TX.init(params)
    with ocp.CheckpointManager(run) as manager:
        for i in range(20):
            if i == 10:
                manager.save(i, args=ocp.args.PyTreeSave({"params": params, "opt_state": opt_state, "step": i}))
            params, opt_state, loss = step(params, opt_state, *batch(i))
            losses.append(loss)

    ckpt, resumed = ok.open(run), []
    params, opt_state = ok.restore_params(ckpt), ok.rebuild_opt_state(ckpt, TX)
    for i in range(ckpt.step, 20):
        params, opt_state, loss = step(params, opt_state, *batch(i))
        resumed.append(loss)
    return losses[10:], resumed


def haiku(run: Path) -> Losses:
    return dicts(run, HAIKU)


@pytest.mark.parametrize("job", [linen, nnx_optimizer, nnx_model_and_optimizer, dicts, haiku])
def test_losses_are_the_same_bit_for_bit(tmp_path: Path, job: Any):
    went_on, resumed = job(tmp_path / "run")
    assert len(resumed) == 10
    assert [np.asarray(x).tobytes() for x in resumed] == [np.asarray(x).tobytes() for x in went_on]


@pytest.mark.parametrize("tx", [TX, None], ids=["with-tx", "without-tx"])
@pytest.mark.parametrize("how", ["path", "manager", "opened"])
def test_an_optimizer_state_rebuilt_without_the_training_code(tmp_path: Path, tx: Any, how: str):
    """Neither the model nor a state of it is there: only the checkpoint, whose own names say what it holds."""
    state = linen_state(TX)
    for i in range(10):
        state, _ = linen_step(state, *batch(i))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        named = {"path": tmp_path / "run", "manager": manager, "opened": ok.open(manager, step=10)}[how]
        rebuilt = ok.rebuild_opt_state(named, tx)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state.opt_state)
    resumed, expected = (linen_step(s, *batch(10))[0] for s in (state.replace(opt_state=rebuilt), state))
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)


def test_a_haiku_states_classes_are_found_by_its_names(tmp_path: Path):
    params = dict_params(HAIKU)
    ocp.PyTreeCheckpointer().save(tmp_path / "run", {"params": params, "opt_state": TX.init(params)})
    rebuilt = ok.rebuild_opt_state(tmp_path / "run")
    assert jax.tree.structure(rebuilt) == jax.tree.structure(TX.init(params))
    assert rebuilt[1][0].mu["mlp/~/linear_0"]["w"].shape == (64, 32)
