"""Saved on eight devices and restored to one, and back: the peak memory shows that no device gets a full copy.

python tests/benchmarks/sharded.py [ROUNDS]
"""

import json
import sys
import tempfile
import time
from functools import partial

import measure

LEAVES, ROWS, COLUMNS = 4, 4096, 8192  # 4 leaves of 134 MB
DEVICES = "--xla_force_host_platform_device_count={}"


def _sharding(devices: int):
    import jax

    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def _abstract(devices: int):
    import jax
    import numpy as np

    sharding = _sharding(devices)
    return {f"w{i}": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=sharding) for i in range(LEAVES)}


def write(folder: str, devices: str) -> None:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    random, sharding = np.random.default_rng(0), _sharding(int(devices))
    params = {
        f"w{i}": jax.device_put(random.standard_normal((ROWS, COLUMNS), np.float32), sharding) for i in range(LEAVES)
    }
    ocp.PyTreeCheckpointer().save(folder, {"params": params})


def child(way: str, path: str, devices: str) -> None:
    """Restore under P("data") over the devices; print seconds and the peak before and after."""
    import resource

    import jax

    target = _abstract(int(devices))
    if way == "orbaxkit":
        import orbaxkit as ok

        load = lambda: ok.restore_params(path, target=target)  # noqa: E731
    else:
        import orbax.checkpoint as ocp

        args = ocp.checkpoint_utils.construct_restore_args({"params": target})
        load = lambda: ocp.PyTreeCheckpointer().restore(path, restore_args=args)["params"]  # noqa: E731
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    before, start = peak(), time.perf_counter()
    params = jax.block_until_ready(load())
    seconds = time.perf_counter() - start
    shards = {len(leaf.addressable_shards) for leaf in jax.tree.leaves(params)}
    if shards != {int(devices)}:
        sys.exit(f"restored to {shards} shards, not {devices}")
    print(json.dumps({"seconds": seconds, "peak": peak() - before}))


def measure_way(way: str, path: str, devices: str) -> dict:
    """The report of one child."""
    return measure.python(__file__, "child", way, path, devices, env={"XLA_FLAGS": DEVICES.format(devices)}).report


def main(rounds: int) -> None:
    """Print both directions, then what must hold."""
    nbytes, rows, verdicts = LEAVES * ROWS * COLUMNS * 4, [], []
    measure.warm_memory(4_000_000_000)
    for saved, restored in (("8", "1"), ("1", "8")):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/checkpoint"
            measure.python(__file__, "write", path, saved, env={"XLA_FLAGS": DEVICES.format(saved)})
            ways = {way: partial(measure_way, way, path, restored) for way in ("orbaxkit", "orbax")}
            results = measure.interleaved(ways, rounds)
        for way, runs in results.items():
            seconds, peak = min(r["seconds"] for r in runs), min(r["peak"] for r in runs) / nbytes
            devices = f"{saved} -> {restored}"
            rows.append({"devices": devices, "way": way, "seconds": seconds, "peak / data": peak})
            if way == "orbaxkit":
                verdicts.append(measure.verdict(f"{devices} devices: peak memory against the data", peak, 1.5))
    print(f"data: {nbytes / measure.MB:.0f} MB")
    print(measure.table(rows), end="\n\n")
    print(measure.table(verdicts))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "child"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
