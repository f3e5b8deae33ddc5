"""How fast orbaxkit is on the accelerator at hand, as ratios; on CPU at tiny sizes, which only shows that it runs.

python tests/device/ratios.py, or tests/device/run.sh where something may be missing. The last line printed is JSON:
`ratios` are the time of a plain way over orbaxkit's own, so that 1 is as fast; `below` names those under their bound.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import orbaxkit as ok

LAYERS = 8
# Of the device's own copy. Others depend on the host's disk and processors and are only reported.
BOUNDS = {"unstack": 0.7, "stack": 0.7, "transpose": 0.7}
TRANSFORMS = {
    "unstack": ok.unstack("layers", into="layer_{i}", axis=0),
    "stack": ok.stack("layer_{i}", into="layers", axis=0),
    "transpose": ok.transpose("layers", axes=(0, 2, 1)),
}
_LARGE_DEVICE = 40 << 30


def measure(*, is_tiny: bool) -> dict[str, Any]:
    """Measure everything on the first device."""
    begun = time.perf_counter()
    device = jax.devices()[0]
    width, disk_width = (64, 64) if is_tiny else (_width(device), 8192)
    found: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    found["bytes"], found["disk_bytes"] = (LAYERS * w * w * 2 for w in (width, disk_width))
    ratios: dict[str, float] = {}
    for name, value in [*_on_device(width), *_from_disk(disk_width)]:
        print(f"{name:<24} {value:.3g}", file=sys.stderr, flush=True)
        ratios[name] = round(value, 3)
    found["copy_gigabytes_per_second"] = ratios.pop("copy")
    found["ratios"] = ratios
    found["below"] = [] if is_tiny else [name for name, least in BOUNDS.items() if ratios[name] < least]
    return found | {"is_tiny": is_tiny, "seconds": round(time.perf_counter() - begun, 1)}


def _width(device: Any) -> int:
    """That of 1 GB of layers, or of 8 GB on a large device."""
    return 22528 if device.memory_stats()["bytes_limit"] >= _LARGE_DEVICE else 8192


def _seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """The fastest of several runs; the first, which compiles, is not counted."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _on_device(width: int) -> Iterator[tuple[str, float]]:
    """The bandwidth of the device's copy, which reads and writes each byte, and each transform against that copy."""
    stacked = jnp.ones((LAYERS, width, width), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    seconds = _seconds(lambda: copy(stacked))
    yield "copy", 2 * stacked.nbytes / seconds / 1e9
    for name, transform in TRANSFORMS.items():
        tree = {"layers": stacked} if name != "stack" else {f"layer_{i}": stacked[i] for i in range(LAYERS)}
        yield name, seconds / _seconds(lambda tree=tree, transform=transform: ok.apply(tree, transform))


def _from_disk(width: int) -> Iterator[tuple[str, float]]:
    """Params out of a checkpoint in the page cache, alone and with a fresh optimizer, against those in host memory."""
    block = np.random.default_rng(0).standard_normal((min(width, 1024), width), np.float32).astype(ml_dtypes.bfloat16)
    params = {f"layer_{i}": np.resize(np.roll(block, i), (width, width)) for i in range(LAYERS)}
    tx = optax.adam(1e-3)
    init = jax.jit(tx.init)

    def put_and_init() -> Any:
        placed = jax.device_put(params)
        return placed, init(placed)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/params"
        ok.convert({"params": params}, path)
        put = _seconds(lambda: jax.device_put(params), 3)
        yield "host_to_device", put / _seconds(lambda: ok.restore_params(path), 3)
        yield "reset", _seconds(put_and_init, 3) / _seconds(lambda: ok.reset_optimizer(path, tx), 3)


def main(arguments: list[str]) -> int:
    """Measure, print, and write the JSON to `$OUT` too: a file, or `ratios.json` in a folder. 1: a ratio is too low."""
    has_accelerator = jax.default_backend() != "cpu"
    if not has_accelerator:
        print("no accelerator is here: tiny sizes on CPU, whose ratios say nothing", file=sys.stderr)
    found = measure(is_tiny="--tiny" in arguments or not has_accelerator)
    text = json.dumps(found)
    if out := os.environ.get("OUT"):
        (Path(out) / "ratios.json" if Path(out).is_dir() else Path(out)).write_text(f"{text}\n")
    print(text)
    return 1 if found["below"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
