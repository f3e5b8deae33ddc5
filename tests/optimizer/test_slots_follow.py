"""What transforms do to params they do to the optimizer's mirrors of them."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import f6_tree, save
from optimizer.zoo import PARAMS

import orbaxkit as ok

UNSTACK = ok.unstack("params/layers", into="layers_{i}", axis=1)


def saved(path: Path, params: Any, tx: Any) -> Path:
    """Params and a state in which every float leaf has random values."""
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: np.full_like(x, 3) if x.dtype == np.int32 else rng.random(x.shape, np.float32), tx.init(params)
    )
    return save(path, {"params": params, "opt_state": state, "step": 3})


def described(path: Path, *transforms: Any) -> dict[str, str]:
    """The optimizer's leaves after some transforms."""
    return {n: str(s) for n, s in ok.plan(ok.open(path), *transforms).specs.items() if n.startswith("opt_state")}


def test_A42_moments_unstack_with_their_params(tmp_path: Path):
    tx = optax.adam(1e-3)
    params = jax.tree.map(jnp.asarray, f6_tree())
    path = saved(tmp_path / "c", params, tx)
    whole, layers = ok.restore(path), ok.restore(path, UNSTACK)
    assert set(layers["params"]) == {"embed", *(f"layers_{i}" for i in range(4))}
    for field in ("mu", "nu"):
        old, new = whole["opt_state"][0][field], layers["opt_state"][0][field]
        np.testing.assert_array_equal(new["embed"], old["embed"])
        for i in range(4):
            np.testing.assert_array_equal(new[f"layers_{i}"]["w"], old["layers"]["w"][:, i])
            np.testing.assert_array_equal(new[f"layers_{i}"]["norm"], old["layers"]["norm"][:, i])
    assert int(layers["opt_state"][0]["count"]) == 3
    target = {"params": layers["params"], "opt_state": tx.init(layers["params"]), "step": 0}
    state = ok.restore(path, UNSTACK, target=target)
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(target["opt_state"])


def test_A42_an_unstacked_state_trains_on_as_the_stacked_one(tmp_path: Path):
    tx = optax.adam(1e-2)

    def loss(params: Any) -> jax.Array:
        return sum(jnp.sum(jnp.sin(x) ** 2) for x in jax.tree.leaves(params))

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, f6_tree())
    params, state = step(params, tx.init(params))
    before = {"params": params, "opt_state": state}
    expected = ok.apply(dict(zip(before, step(params, state), strict=True)), UNSTACK)
    path = save(tmp_path / "c", before)
    layers = ok.restore(path, UNSTACK)["params"]
    restored = ok.restore(path, UNSTACK, target={"params": layers, "opt_state": tx.init(layers)})
    chex.assert_trees_all_close(step(restored["params"], restored["opt_state"])[0], expected["params"], rtol=1e-6)


def test_stacking_undoes_unstacking(tmp_path: Path):
    path = saved(tmp_path / "c", jax.tree.map(jnp.asarray, f6_tree()), optax.adam(1e-3))
    back = ok.restore(path, UNSTACK, ok.stack("params/layers_{i}", into="layers", axis=1))
    chex.assert_trees_all_equal(back, ok.restore(path))


LAYOUTS = {
    "rename": ok.rename({"params/{a}/kernel": "params/{a}/weight"}),
    "transpose": ok.transpose("params/**/kernel"),
    "reshape": ok.reshape("params/out/kernel", (8,)),
    "split": ok.split("params/out/kernel", into=["left", "right"], axis=0),
    "concat": ok.concat(["params/hidden/bias", "params/out/bias"], into="all", axis=0, sizes=[4, 2]),
    "chain": ok.chain(ok.rename({"params/out/**": "params/head/**"}), ok.transpose("params/head/kernel")),
}


@pytest.mark.parametrize("transform", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_transforms_act_on_moments(tmp_path: Path, transform: Any):
    """The moments end up as if they had been the params."""
    path = saved(tmp_path / "c", PARAMS, optax.adam(1e-3))
    whole, changed = ok.restore(path), ok.restore(path, transform)
    for field in ("mu", "nu"):
        alone = ok.apply({"params": whole["opt_state"][0][field]}, transform)["params"]
        chex.assert_trees_all_equal(changed["opt_state"][0][field], alone)
    chex.assert_trees_all_equal(changed["opt_state"][0]["count"], whole["opt_state"][0]["count"])


LITERAL = {
    "cast": ok.cast("bfloat16", "params/**"),
    "fill": ok.fill("params/out/bias", 0.0),
    "moved-together": ok.rename({"params/**": "model/**"}),
    "shift": ok.affine("params/out/bias", shift=1.0),
}


@pytest.mark.parametrize("transform", LITERAL.values(), ids=LITERAL)
def test_moments_stay_as_they_are(tmp_path: Path, transform: Any):
    path = saved(tmp_path / "c", PARAMS, optax.adam(1e-3))
    chex.assert_trees_all_equal(ok.restore(path, transform)["opt_state"], ok.restore(path)["opt_state"])


def test_patterns_that_mean_moments_too_are_followed_once(tmp_path: Path):
    path = saved(tmp_path / "c", PARAMS, optax.adam(1e-3))
    whole, changed = ok.restore(path), ok.restore(path, ok.transpose("**/kernel"))
    np.testing.assert_array_equal(
        changed["opt_state"][0]["mu"]["out"]["kernel"], whole["opt_state"][0]["mu"]["out"]["kernel"].T
    )


def test_copies_of_params_are_scaled_with_them(tmp_path: Path):
    path = saved(tmp_path / "c", PARAMS, optax.contrib.schedule_free_sgd(0.1))
    whole, changed = ok.restore(path), ok.restore(path, ok.affine("params/out/bias", scale=2.0))
    np.testing.assert_allclose(changed["opt_state"]["z"]["out"]["bias"], 2 * whole["opt_state"]["z"]["out"]["bias"])


REFUSED = {
    "scale": (optax.adam(1e-3), ok.affine("params/out/bias", scale=2.0), "a param scaled by 2 has other moments"),
    "drop": (optax.adam(1e-3), ok.drop("params/out/**"), "would be left without its param params/out/bias"),
    "norms": (optax.novograd(1e-3), ok.split("params/out/kernel", into=["a", "b"], axis=0), "one value for each param"),
    "axes": (optax.sm3(1e-3), ok.transpose("params/out/kernel"), "one value for each position of each axis"),
    "apart": (optax.adam(1e-3), ok.rename({"params/out/**": "head/**"}), "cannot follow its param to head/bias"),
}


@pytest.mark.parametrize(("tx", "transform", "message"), REFUSED.values(), ids=REFUSED)
def test_what_moments_cannot_follow_is_refused(tmp_path: Path, tx: Any, transform: Any, message: str):
    path = saved(tmp_path / "c", PARAMS, tx)
    with pytest.raises(ok.TransformError, match="the optimizer state cannot follow") as error:
        ok.plan(ok.open(path), transform)
    assert message in str(error.value)
    ok.plan(ok.open(path), ok.select("params/**"), transform)


def test_dropping_moments_with_their_params_is_no_orphan(tmp_path: Path):
    path = saved(tmp_path / "c", PARAMS, optax.adam(1e-3))
    left = described(path, ok.drop("params/out/**", "opt_state/*/*/out/**"))
    assert sorted(left) == ["opt_state/0/count", "opt_state/0/mu/hidden/bias", "opt_state/0/mu/hidden/kernel",
                            "opt_state/0/nu/hidden/bias", "opt_state/0/nu/hidden/kernel", "opt_state/1"]  # fmt: skip


def test_merging_lora_is_refused_beside_moments(tmp_path: Path):
    params = {
        "w": np.eye(2, dtype=np.float32),
        "lora_a": np.ones((2, 1), np.float32),
        "lora_b": np.ones((1, 2), np.float32),
    }
    path = saved(tmp_path / "c", params, optax.adam(1e-3))
    merge = ok.merge_lora("params/w", a="params/lora_a", b="params/lora_b")
    with pytest.raises(ok.TransformError, match="a merged weight has no moments of its own"):
        ok.plan(ok.open(path), merge)


def test_frozen_params_have_nothing_to_follow(tmp_path: Path):
    tx = optax.masked(optax.adam(1e-3), {"hidden": True, "out": False})
    path = saved(tmp_path / "c", PARAMS, tx)
    changed = ok.restore(path, ok.transpose("params/**/kernel"))
    assert changed["params"]["out"]["kernel"].shape == (2, 4)
    assert changed["opt_state"]["inner_state"][0]["mu"]["hidden"]["kernel"].shape == (4, 3)


def adafactor(path: Path, *shape: int) -> Path:
    params = {"layers": {"w": jnp.zeros(shape)}, "embed": jnp.zeros((10, 8))}
    return saved(path, params, optax.adafactor(1e-3))


def test_A36_adafactor_unstacks_where_the_layer_axis_is_not_factored(tmp_path: Path):
    path = adafactor(tmp_path / "c", 4, 256, 128)
    unstack = ok.unstack("params/layers", into="layers_{i}", axis=0)
    whole, layers = ok.restore(path)["opt_state"][0], ok.restore(path, unstack)["opt_state"][0]
    for field, shape in {"v_row": (128,), "v_col": (256,), "v": (1,)}.items():
        for i in range(4):
            new, old = layers[field][f"layers_{i}"]["w"], whole[field]["layers"]["w"]
            assert new.shape == shape
            np.testing.assert_array_equal(new, old if field == "v" else old[i])
    back = ok.restore(path, unstack, ok.stack("params/layers_{i}", into="layers", axis=0))
    chex.assert_trees_all_equal(back, ok.restore(path))


def test_A36_an_unstacked_adafactor_state_is_one_of_tx(tmp_path: Path):
    path = adafactor(tmp_path / "c", 4, 256, 128)
    unstack = ok.unstack("params/layers", into="layers_{i}", axis=0)
    params = ok.restore(path, unstack, ok.select("params/**"))["params"]
    target = {"params": params, "opt_state": optax.adafactor(1e-3).init(params)}
    chex.assert_trees_all_equal_shapes(ok.restore(path, unstack, target=target), target)


def test_A36_adafactor_factored_over_the_layer_axis_is_refused(tmp_path: Path):
    path = adafactor(tmp_path / "c", 200, 256, 128)
    with pytest.raises(ok.TransformError, match="factored over the layer axis 0") as error:
        ok.plan(ok.open(path), ok.unstack("params/layers", into="layers_{i}", axis=0))
    assert "ok.reset_optimizer" in str(error.value)


def test_lbfgs_memories_follow_one_axis_further_back(tmp_path: Path):
    path = saved(tmp_path / "c", PARAMS, optax.lbfgs(memory_size=3))
    changed = described(path, ok.transpose("params/out/kernel"))
    assert changed["opt_state/0/diff_params_memory/out/kernel"] == "float32[3, 2, 4]"
    assert changed["opt_state/0/params/out/kernel"] == "float32[2, 4]"
