"""Optimizer states come back as optax made them: for every optimizer of optax, plain and wrapped."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import save
from optimizer.zoo import ALIASES, PARAMS, PLAIN, WRAPPERS, make_step, scrambled, train

import orbaxkit as ok
from orbaxkit.optimizer.inference import infer
from orbaxkit.optimizer.stored import stored_state

WRAPPED = {f"{wrapper}-{name}": WRAPPERS[wrapper](tx) for wrapper in WRAPPERS for name, tx in ALIASES.items()}


def same(a: Any, b: Any) -> None:
    """The same structure, types and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)

    def data(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    for x, y in zip(map(data, jax.tree.leaves(a)), map(data, jax.tree.leaves(b)), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def test_there_are_many_optimizers():
    assert len(ALIASES) >= 25
    assert {"adam", "adafactor", "lbfgs", "sm3", "rprop"} <= set(ALIASES)
    assert {"contrib_prodigy", "contrib_muon", "contrib_schedule_free_adamw"} <= set(PLAIN)


def classes(tree: Any, path: str) -> dict[str, type]:
    """The class of every NamedTuple of a state, by its path."""
    from orbaxkit.trees import children_of

    found = {path: type(tree)} if hasattr(tree, "_fields") else {}
    for key, child in children_of(tree)[0].items():
        found |= classes(child, f"{path}/{key}")
    return found


def check_inferred(checkpoint: ok.Checkpoint, at: str, state: Any) -> None:
    """Without tx: what is called certain or inferred is right, the truth is among the candidates of the rest."""
    real = classes(state, at)
    guesses = infer(stored_state(checkpoint.specs, at))[1]
    for guess in guesses:
        kind = real.get(guess.path)
        if kind is None:
            continue
        right = (guess.name,) if guess.how != "ambiguous" else guess.candidates
        assert kind.__name__ in right, guess
    assumed = {g.path: real[g.path] for g in guesses if g.how == "ambiguous" and g.path in real}
    same(ok.rebuild_opt_state(checkpoint, assume=assumed, at=at), state)


@pytest.mark.parametrize("name", PLAIN)
def test_rebuilt_with_tx_it_trains_on_as_if_never_saved_and_without(tmp_path: Path, name: str):
    """After three steps, with two optimizers side by side."""
    params, state, step = train(PLAIN[name], name)
    checkpoint = ok.open(save(tmp_path / "c", {"params": params, "a": state, "b": optax.adam(1e-3).init(params)}))
    rebuilt = ok.rebuild_opt_state(checkpoint, PLAIN[name], at="a")
    same(rebuilt, state)
    chex.assert_trees_all_equal(step(params, rebuilt), step(params, state))
    check_inferred(checkpoint, "a", state)


@pytest.mark.parametrize("name", WRAPPED)
def test_rebuilt_inside_wrappers_with_tx_and_without(tmp_path: Path, name: str):
    """Every leaf another value."""
    tx = WRAPPED[name]
    state = scrambled(jax.eval_shape(tx.init, PARAMS), seed=len(name))
    checkpoint = ok.open(save(tmp_path / "c", {"params": PARAMS, "all": {"opt_state": state}}))
    same(ok.rebuild_opt_state(checkpoint, tx, PARAMS, at="all/opt_state"), state)
    check_inferred(checkpoint, "all/opt_state", state)


def f1(tmp_path: Path) -> tuple[Path, Any, Any, Any]:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params, state, _ = train(tx)
    return save(tmp_path / "c", {"params": params, "opt_state": state, "step": 3}), tx, params, state


def test_A30_chain_of_clip_and_adamw_without_tx(tmp_path: Path):
    path, tx, params, state = f1(tmp_path)
    rebuilt = ok.rebuild_opt_state(path)
    assert isinstance(rebuilt[0], optax.EmptyState)
    assert isinstance(rebuilt[1][0], optax.ScaleByAdamState)
    assert isinstance(rebuilt[1][1], optax.EmptyState)
    assert int(rebuilt[1][0].count) == 3
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tx.init(params))
    step = make_step(tx)
    chex.assert_trees_all_equal(step(params, rebuilt), step(params, state))


def test_A31_masked_params(tmp_path: Path):
    tx = optax.masked(optax.adam(1e-3), {"kernel": True, "bias": False})
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    path = save(tmp_path / "c", {"params": params, "opt_state": tx.init(params)})
    assert ok.rebuild_opt_state(path, tx).inner_state[0].mu["bias"] == optax.MaskedNode()
    assert isinstance(ok.rebuild_opt_state(path, tx).inner_state[0].mu["bias"], optax.MaskedNode)
    guesses = {g.path: g for g in infer(stored_state(ok.open(path).specs))[1]}
    assert guesses["opt_state/inner_state/0/mu/bias"].candidates == ("None", "EmptyState", "MaskedNode")


def test_A35_gradient_accumulation_goes_on(tmp_path: Path):
    tx = optax.MultiSteps(optax.sgd(1.0), 4)
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    for g in (1.0, 2.0, 3.0):
        _, state = tx.update({"w": jnp.asarray(g)}, state, params)
    path = save(tmp_path / "c", {"params": params, "opt_state": state})
    rebuilt = ok.rebuild_opt_state(path, tx)
    assert (int(rebuilt.mini_step), float(rebuilt.acc_grads["w"])) == (3, 2.0)
    updates, _ = tx.update({"w": jnp.asarray(4.0)}, rebuilt, params)
    assert float(updates["w"]) == -2.5


def test_moments_get_their_params_shardings(tmp_path: Path):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    path, tx, _, state = f1(tmp_path)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = NamedSharding(mesh, PartitionSpec(None, "model"))
    shared = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.ndim == 2 else shared), PARAMS
    )
    for rebuilt in (ok.rebuild_opt_state(path, tx, abstract), ok.rebuild_opt_state(path, params=abstract)):
        same(rebuilt, state)
        assert rebuilt[1][0].mu["hidden"]["kernel"].sharding == split
        assert rebuilt[1][0].count.sharding == shared


def test_nnx_states_keep_string_indices_gaps_and_values(tmp_path: Path):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.hidden, self.out = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        grads = nnx.grad(lambda m: jnp.sum(m.out(m.hidden(jnp.ones((2, 3)))) ** 2))(model)
        optimizer.update(model, grads)
    path = save(tmp_path / "c", {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    plain = ok.rebuild_opt_state(path, tx)
    assert jax.tree.structure(plain) == jax.tree.structure(tx.init(pure))
    assert int(plain[1][0].count) == 3
    boxed = ok.rebuild_opt_state(path, tx, nnx.state(model, nnx.Param))
    assert jax.tree.structure(boxed) == jax.tree.structure(tx.init(nnx.state(model, nnx.Param)))
    inferred = ok.rebuild_opt_state(path)
    same(inferred[1][0], plain[1][0])
    assert isinstance(inferred[0], optax.EmptyState)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, pure), plain, pure)
    assert jax.tree.structure(updates) == jax.tree.structure(pure)


def test_no_optimizer_is_an_error(tmp_path: Path):
    with pytest.raises(ok.CheckpointError, match="no optimizer state in this checkpoint\n  params: is here"):
        ok.rebuild_opt_state(save(tmp_path / "c", {"params": PARAMS}))


def test_two_optimizers_are_an_error_that_at_settles(tmp_path: Path):
    state = optax.adam(1e-3).init(PARAMS)
    tree = {name: {"params": PARAMS, "opt_state": state} for name in ("actor", "critic")}
    path = save(tmp_path / "c", tree)
    with pytest.raises(ok.CheckpointError, match="2 optimizer states") as error:
        ok.rebuild_opt_state(path)
    assert [leaf for leaf, _ in error.value.leaves] == ["actor/opt_state", "critic/opt_state"]
    same(ok.rebuild_opt_state(path, at="critic/opt_state"), state)


def test_another_tx_is_an_error_that_lists_the_leaves(tmp_path: Path):
    path = f1(tmp_path)[0]
    with pytest.raises(ok.TargetError, match=r"is not one of this tx[\s\S]*migrate_opt_state") as error:
        ok.rebuild_opt_state(path, optax.sgd(0.1, momentum=0.9))
    assert ("opt_state/0/trace/out/bias", "is wanted, and not in the checkpoint") in error.value.leaves


def test_other_params_are_an_error(tmp_path: Path):
    path, tx, _, _ = f1(tmp_path)
    other = {**PARAMS, "out": {"kernel": np.zeros((4, 7), np.float32), "bias": np.zeros(7, np.float32)}}
    with pytest.raises(ok.TargetError, match="saved for other params") as error:
        ok.rebuild_opt_state(path, tx, other)
    assert len(error.value.leaves) == 4


def test_an_assumed_class_must_have_the_fields(tmp_path: Path):
    path = f1(tmp_path)[0]
    rebuilt = ok.rebuild_opt_state(path, assume={"opt_state/1/0": optax.ScaleByBeliefState})
    assert isinstance(rebuilt[1][0], optax.ScaleByBeliefState)
    with pytest.raises(ok.CheckpointError, match="ScaleByLionState cannot be assumed here"):
        ok.rebuild_opt_state(path, assume={"opt_state/1/0": optax.ScaleByLionState})
    with pytest.raises(ok.CheckpointError, match="ambiguous: opt_state/1/0"):
        ok.rebuild_opt_state(path, assume={"opt_state/7": optax.ScaleByBeliefState})


EMPTY = {
    "none": {"a": None, "w": jnp.ones(2)},
    "empty": {"a": {}, "l": [], "t": (), "w": jnp.ones(2)},
    "number": {"s": 1.5, "w": jnp.ones(2)},
}


@pytest.mark.parametrize("name", EMPTY)
def test_params_that_hold_nothing_or_a_number_are_params_too(tmp_path: Path, name: str):
    tx = optax.adam(1e-3)
    state = tx.init(EMPTY[name])
    path = save(tmp_path / "c", {"params": EMPTY[name], "opt_state": state, "step": 3})
    reset = ok.reset_optimizer(path, tx)
    assert jax.tree.structure(reset["params"]) == jax.tree.structure(EMPTY[name])
    made = (ok.rebuild_opt_state(path, tx), ok.rebuild_opt_state(path), ok.migrate_opt_state(path, tx))
    for other in (reset["opt_state"], *made):
        assert jax.tree.structure(other) == jax.tree.structure(state)


def test_arguments_of_the_wrong_kind_are_named():
    """In a process of its own, since the type checker of these tests would refuse them first."""
    calls = [
        "ok.rebuild_opt_state(path, assume=['x'])", "ok.rebuild_opt_state(path, assume={0: 1})",
        "ok.rebuild_opt_state(path, at=3)", "ok.reset_optimizer(path, tx, keep=3)",
        "ok.reset_optimizer(path, tx, only=[3])", "ok.migrate_opt_state(path, tx, sources={0: 'x'})",
        "ok.migrate_opt_state(path, tx, sources=['x'])", "ok.migrate_opt_state(path, tx, schedule_count='x')",
        "ok.migrate_opt_state(path, tx, schedule_count=-1)", "ok.reset_optimizer(path, tx, on_missing='zeros')",
    ]  # fmt: skip
    code = """
import sys, pathlib, tempfile, jax.numpy as jnp, optax, orbaxkit as ok
path, tx = pathlib.Path(tempfile.mkdtemp()) / "c", optax.adam(optax.constant_schedule(1.0))
params = {"w": jnp.ones(2)}
ok.convert({"params": params, "opt_state": tx.init(params)}, path)
for call in sys.argv[1:]:
    try:
        eval(call)
        print(call)
    except ok.OrbaxkitError:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *calls], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
