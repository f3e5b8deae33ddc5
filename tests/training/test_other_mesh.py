"""Half of a run on one mesh of devices, the other half on another."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from training.models import HAIKU, NnxMlp, batch, dict_params, dict_step, linen_state, linen_step, nnx_joint_step

import orbaxkit as ok

ADAM = optax.adam(1e-2)
Told = tuple[Any, Any, list[Any], list[Any]]  # the saved state, the restored one; losses of both from then on


def mesh_of(data: int, model: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def sharding_of(leaf: Any, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P("model") if len(leaf.shape) == 2 else P())


def shardings(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: sharding_of(leaf, mesh), tree)


def abstract(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x, mesh)), tree)


def batch_on(mesh: Mesh, step: int) -> Any:
    return jax.device_put(batch(step), NamedSharding(mesh, P("data")))


def linen(run: Path, before: Mesh, after: Mesh) -> Told:
    state = linen_state(ADAM)
    state = jax.device_put(state, shardings(state, before))
    for i in range(10):
        state, _ = linen_step(state, *batch_on(before, i))
    with ocp.CheckpointManager(run) as manager:
        manager.save(10, args=ocp.args.StandardSave(state))

    target = abstract(jax.eval_shape(lambda: linen_state(ADAM)), after)
    saved, restored, losses, resumed = state, ok.restore(run, target=target), [], []
    other = restored
    for i in range(10, 20):
        state, loss = linen_step(state, *batch_on(before, i))
        losses.append(loss)
        other, loss = linen_step(other, *batch_on(after, i))
        resumed.append(loss)
    return saved, restored, losses, resumed


def nnx_model_and_optimizer(run: Path, before: Mesh, after: Mesh) -> Told:
    trained = nnx.ModelAndOptimizer(NnxMlp(), ADAM)
    nnx.update(trained, jax.device_put(nnx.state(trained), shardings(nnx.state(trained), before)))
    for i in range(10):
        nnx_joint_step(trained, *batch_on(before, i))
    saved = jax.tree.map(np.asarray, nnx.state(trained))
    with ocp.CheckpointManager(run) as manager:
        manager.save(10, args=ocp.args.StandardSave(nnx.state(trained)))

    other = nnx.eval_shape(lambda: nnx.ModelAndOptimizer(NnxMlp(), ADAM))
    restored = ok.restore(run, target=abstract(nnx.state(other), after))
    nnx.update(other, restored)
    losses = [nnx_joint_step(trained, *batch_on(before, i)) for i in range(10, 20)]
    return saved, restored, losses, [nnx_joint_step(other, *batch_on(after, i)) for i in range(10, 20)]


def haiku(run: Path, before: Mesh, after: Mesh) -> Told:
    params, step = dict_params(HAIKU), dict_step(HAIKU, ADAM)
    params = jax.device_put(params, shardings(params, before))
    opt_state = jax.device_put(ADAM.init(params), shardings(ADAM.init(params), before))
    for i in range(10):
        params, opt_state, _ = step(params, opt_state, *batch_on(before, i))
    with ocp.CheckpointManager(run) as manager:
        manager.save(10, args=ocp.args.PyTreeSave({"params": params, "opt_state": opt_state}))

    other = ok.restore_params(run, sharding=lambda path, spec: sharding_of(spec, after))
    other_state = ok.rebuild_opt_state(run, ADAM, other)  # where its params are
    saved, restored, losses, resumed = (params, opt_state), (other, other_state), [], []
    for i in range(10, 20):
        params, opt_state, loss = step(params, opt_state, *batch_on(before, i))
        losses.append(loss)
        other, other_state, loss = step(other, other_state, *batch_on(after, i))
        resumed.append(loss)
    return saved, restored, losses, resumed


MESHES = {"8-to-4": ((2, 4), (2, 2)), "8-to-1": ((2, 4), (1, 1)), "1-to-8": ((1, 1), (4, 2))}


@pytest.mark.parametrize("job", [linen, nnx_model_and_optimizer, haiku])
@pytest.mark.parametrize(("before", "after"), MESHES.values(), ids=MESHES)
def test_the_state_is_the_same_elsewhere_and_trains_on(tmp_path: Path, job: Any, before: Any, after: Any):
    saved, restored, losses, resumed = job(tmp_path / "run", mesh_of(*before), mesh_of(*after))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, saved))
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding.is_equivalent_to(sharding_of(leaf, mesh_of(*after)), leaf.ndim)
    # Sums over devices round in another order.
    np.testing.assert_allclose(resumed, losses, rtol=1e-4)
