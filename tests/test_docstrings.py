"""Every public name has a docstring with an example, and the examples run, beside a run at `runs/pi0`."""

import doctest
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import save

import orbaxkit as ok

NAMES = [name for name in ok.__all__ if name != "__version__"]
TX = optax.adamw(1e-3)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A run of two steps; what the examples may use."""
    monkeypatch.chdir(tmp_path)
    params = {
        "blocks": {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.zeros((3, 8))},
        "head": {"kernel": jnp.ones((8, 2), jnp.bfloat16)},
    }
    state = {"params": params, "opt_state": TX.init(params), "step": 20000}
    for step in (10000, 20000):
        save(Path(f"runs/pi0/{step}/default").absolute(), state)
    names = {"ok": ok, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "ocp": ocp, "tx": TX, "state": state}
    return names | {"params": params}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_has_an_example_that_runs(name: str, run: dict):
    text = inspect.getdoc(getattr(ok, name))
    assert text
    found = doctest.DocTestParser().get_doctest(text, dict(run), name, None, None)
    assert found.examples, f"ok.{name} has no example"
    assert not any(doctest.SKIP in example.options for example in found.examples)
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(found, out=told.append)
    assert not told, "".join(told)
