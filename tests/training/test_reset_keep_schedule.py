"""A fresh optimizer for trained params, while the step and the learning rate's schedule go on where they were."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=5, decay_steps=20, end_value=1e-4)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))
Told = tuple[Any, Any, int, list[Any]]  # trained params, the state after the reset, the step; losses from then on


def linen(run: Path) -> Told:
    trained = linen_state(TX)
    for i in range(10):
        trained, _ = linen_step(trained, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, trained)

    state, losses = ok.reset_optimizer(run, TX, target=linen_state(TX, seed=1), keep=("step", "schedule")), []
    fresh, step = state.opt_state, int(state.step)
    for i in range(step, 20):
        state, loss = linen_step(state, *batch(i))
        losses.append(loss)
    return trained.params, fresh, step, losses


def pure_state(node: Any) -> Any:
    """The state as nested dicts of arrays, which `nnx.update` takes as well."""
    return nnx.to_pure_dict(nnx.state(node))


def nnx_optimizer(run: Path, state_of: Any = pure_state) -> Told:
    model = NnxMlp()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    for i in range(10):
        nnx_step(model, optimizer, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    model = NnxMlp(seed=1)
    optimizer, losses = nnx.Optimizer(model, TX, wrt=nnx.Param), []
    target = {"model": state_of(model), "optimizer": state_of(optimizer)}
    state = ok.reset_optimizer(run, TX, target=target, keep=("step", "schedule"))
    nnx.update(model, state["model"])
    nnx.update(optimizer, state["optimizer"])
    fresh, step = jax.tree.map(jnp.copy, pure_state(optimizer)["opt_state"]), int(optimizer.step[...])
    for i in range(step, 20):
        losses.append(nnx_step(model, optimizer, *batch(i)))
    return trained, fresh, step, losses


def nnx_model_and_optimizer(run: Path, state_of: Any = pure_state) -> Told:
    joint = nnx.ModelAndOptimizer(NnxMlp(), TX)
    for i in range(10):
        nnx_joint_step(joint, *batch(i))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run, nnx.state(joint))
    trained = nnx.to_pure_dict(nnx.state(joint.model, nnx.Param))

    joint, losses = nnx.ModelAndOptimizer(NnxMlp(seed=1), TX), []
    nnx.update(joint, ok.reset_optimizer(run, TX, target=state_of(joint), keep=("step", "schedule")))
    fresh, step = jax.tree.map(jnp.copy, pure_state(joint)["opt_state"]), int(joint.step[...])
    for i in range(step, 20):
        losses.append(nnx_joint_step(joint, *batch(i)))
    return trained, fresh, step, losses


def dicts(run: Path, names: Names = DICTS) -> Told:
    params, step = dict_params(names), dict_step(names, TX)
    opt_state = TX.init(params)
    for i in range(10):
        params, opt_state, _ = step(params, opt_state, *batch(i))
    trained = params
    ocp.PyTreeCheckpointer().save(run, {"params": params, "opt_state": opt_state, "step": 10})

    state, losses = ok.reset_optimizer(run, TX, keep=("step", "schedule")), []
    params, opt_state = state["params"], state["opt_state"]
    for i in range(state["step"], 20):
        params, opt_state, loss = step(params, opt_state, *batch(i))
        losses.append(loss)
    return trained, state["opt_state"], state["step"], losses


def haiku(run: Path) -> Told:
    return dicts(run, HAIKU)


def by_hand(params: Any) -> tuple[Any, Any]:
    """What optax alone makes of it: a new state, with the schedule's count set to ten."""
    clip, (adam, decay, schedule) = TX.init(params)
    return clip, (adam, decay, schedule._replace(count=jnp.asarray(10, jnp.int32)))


def nnx_optimizer_boxed(run: Path) -> Told:
    return nnx_optimizer(run, nnx.state)


def nnx_model_and_optimizer_boxed(run: Path) -> Told:
    return nnx_model_and_optimizer(run, nnx.state)


JOBS = [
    linen,
    nnx_optimizer,
    nnx_model_and_optimizer,
    nnx_optimizer_boxed,
    nnx_model_and_optimizer_boxed,
    dicts,
    haiku,
]


@pytest.mark.parametrize("job", JOBS)
def test_moments_start_again_and_the_schedule_goes_on(tmp_path: Path, job: Any):
    params, fresh, step, losses = job(tmp_path / "run")
    assert step == 10
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(fresh), jax.tree.leaves(by_hand(params)))
    assert len(losses) == 10
    assert np.mean(losses[-3:]) < losses[0]


@pytest.mark.parametrize("names", [DICTS, HAIKU], ids=["dicts", "haiku"])
def test_losses_are_those_of_optax_alone(tmp_path: Path, names: Names):
    params, _, _, losses = dicts(tmp_path / "run", names)
    opt_state, step = by_hand(params), dict_step(names, TX)
    for i, loss in zip(range(10, 20), losses, strict=True):
        params, opt_state, expected = step(params, opt_state, *batch(i))
        assert float(loss) == float(expected)
    assert int(optax.tree_utils.tree_get(opt_state[1][2], "count")) == 20


def test_without_keep_the_learning_rate_warms_up_again(tmp_path: Path):
    dicts(tmp_path / "run")
    state = ok.reset_optimizer(tmp_path / "run", TX)
    assert (state["step"], int(state["opt_state"][1][2].count)) == (0, 0)
    params, _, _ = dict_step(DICTS, TX)(state["params"], state["opt_state"], *batch(0))
    jax.tree.map(np.testing.assert_array_equal, params, state["params"])
