"""What describe() tells of optimizer states: what is certain, counts, frozen params, averages, oddities."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import save
from optimizer.zoo import PARAMS

import orbaxkit as ok
from orbaxkit.cli import main


def adam_at(count: int, **moments: Any) -> Any:
    """F1's optimizer at a count, its moments 0.5."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    clip, (adam, *rest) = tx.init(PARAMS)
    half = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)
    return clip, (adam._replace(count=jnp.asarray(count), **{"mu": half, "nu": half, **moments}), *rest)


def test_nodes_are_certain_inferred_or_ambiguous(tmp_path: Path):
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": adam_at(3), "step": 3})
    found = ok.open(path).describe()
    how = {guess.path: (guess.name, guess.how) for guess in found.states}
    assert how["opt_state/0"] == ("EmptyState", "inferred")
    assert how["opt_state/1/0"] == ("ScaleByAdamState", "ambiguous")
    (adam,) = found.ambiguous
    assert adam.candidates == ("ScaleByAdamState", "ScaleByBeliefState", "ScaleByRStdDevWithCountState")
    assert "ambiguous  opt_state/1/0 ScaleByAdamState" in str(found)


def test_counts_are_read_and_compared_with_the_step(tmp_path: Path):
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": adam_at(3), "step": 3})
    found = ok.open(path).describe()
    assert found.counts == {"opt_state/1/0/count": 3}
    assert found.oddities == ()
    path = save(tmp_path / "d", {"params": PARAMS, "opt_state": adam_at(3), "step": 5000})
    assert ok.open(path).describe().oddities == ("opt_state/1/0/count is 3, step is 5,000",)


def test_no_other_array_bytes_are_read(tmp_path: Path):
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": adam_at(3), "step": 3}, use_ocdbt=False)
    for folder in [*path.glob("params.*"), *path.glob("opt_state.*.mu.*"), *path.glob("opt_state.*.nu.*")]:
        for chunk in folder.iterdir():
            if not chunk.name.startswith(".z"):
                chunk.unlink()
    assert ok.open(path).describe().counts == {"opt_state/1/0/count": 3}


def test_frozen_params_and_averages_are_named(tmp_path: Path):
    state = optax.adam(1e-3).init({"hidden": PARAMS["hidden"]})
    path = save(tmp_path / "c", {"params": PARAMS, "ema_params": PARAMS, "opt_state": state})
    found = ok.open(path).describe()
    assert found.frozen == ("params/out/bias", "params/out/kernel")
    assert found.averages == ("ema_params",)
    assert "frozen     no moments for 2: params/out/bias, params/out/kernel" in str(found)


def test_values_finds_moments_that_are_zero_or_not_finite(tmp_path: Path):
    zeros = jax.tree.map(jnp.zeros_like, PARAMS["out"])
    half = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS["hidden"])
    broken = {"kernel": half["kernel"].at[1, 1].set(np.nan), "bias": half["bias"]}
    state = adam_at(1000, mu={"hidden": half, "out": zeros}, nu={"hidden": broken, "out": zeros})
    checkpoint = ok.open(save(tmp_path / "c", {"params": PARAMS, "opt_state": state, "step": 1000}))
    assert checkpoint.describe().oddities == ()
    assert checkpoint.describe(values=True).oddities == (
        "opt_state/1/0/nu/hidden/kernel holds values that are not finite",
        "out/bias: all moments are zero at count 1,000: it gets no gradient",
        "out/kernel: all moments are zero at count 1,000: it gets no gradient",
    )


def test_bfloat16_moments_are_looked_at_too(tmp_path: Path):
    params = {"w": jnp.ones((3, 2))}
    state = optax.adam(1e-3, mu_dtype="bfloat16").init(params)
    state = (state[0]._replace(mu={"w": jnp.full((3, 2), jnp.inf, jnp.bfloat16)}), state[1])
    checkpoint = ok.open(save(tmp_path / "c", {"params": params, "opt_state": state}))
    assert checkpoint.describe(values=True).oddities == ("opt_state/0/mu/w holds values that are not finite",)


def test_inspect_reads_moments_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    path = save(tmp_path / "c", {"params": PARAMS, "opt_state": adam_at(1000, mu=zeros, nu=zeros)})
    assert main(["inspect", str(path), "--values"]) == 0
    assert "odd        out/bias: all moments are zero at count 1,000" in capsys.readouterr().out
