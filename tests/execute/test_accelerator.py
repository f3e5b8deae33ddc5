"""How fast kernels are on an accelerator, against its own copy; on CPU at tiny sizes, that the measurement works."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import orbaxkit as ok

LAYERS = 8
TRANSFORMS = {
    "unstack": ok.unstack("layers", into="layer_{i}", axis=0),
    "stack": ok.stack("layer_{i}", into="layers", axis=0),
    "transpose": ok.transpose("layers", axes=(0, 2, 1)),
}


def _seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """The fastest of several runs; the first, which compiles, is not counted."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def bandwidth_ratio(name: str, width: int) -> float:
    """The time of copying the bytes on the device over that of the transform: 1 is the device's own copy."""
    stacked = jnp.ones((LAYERS, width, width), jnp.bfloat16)
    tree = {"layers": stacked} if name != "stack" else {f"layer_{i}": stacked[i] for i in range(LAYERS)}
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    return _seconds(lambda: copy(stacked)) / _seconds(lambda: ok.apply(tree, TRANSFORMS[name]))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_measurement_runs_anywhere(name):
    assert bandwidth_ratio(name, width=32) > 0


@pytest.mark.accelerator
@pytest.mark.parametrize("name", TRANSFORMS)
def test_at_least_70_percent_of_the_devices_copy_bandwidth(name):
    width = 8192 if jax.devices()[0].memory_stats()["bytes_limit"] < 40 << 30 else 22528  # 1 GB, or 8 GB, of bfloat16
    assert bandwidth_ratio(name, width) >= 0.7
