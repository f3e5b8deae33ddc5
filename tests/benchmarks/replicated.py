"""What is replicated: each process reads it and puts it on every device, against the ways that pass it on.

Within a process the host's array can go to each device, or to one and from there to the others; between processes
each can read, or one reads and broadcasts.

python tests/benchmarks/replicated.py [ROUNDS]
"""

import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]  # in the processes, too

import measure  # noqa: E402
from processes.harness import run_processes  # noqa: E402

LEAVES, ROWS, COLUMNS = 2, 4096, 4096  # 2 leaves of 67 MB
DEVICES = 4


def write(path: str) -> None:
    import numpy as np
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    tree = {f"w{i}": random.standard_normal((ROWS, COLUMNS), np.float32) for i in range(LEAVES)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path: str, way: str) -> tuple[float, int]:
    """Seconds and bytes of memory that a process takes until the leaves lie on all of its devices."""
    import resource

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    import orbaxkit as ok

    target = {f"w{i}": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32) for i in range(LEAVES)}
    whole = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), jax.sharding.PartitionSpec())

    def read(sharding: jax.sharding.Sharding | None) -> dict:
        leaves = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in target.items()}
        return ok.restore(path, target=leaves)

    def one_reads() -> dict:
        zeros = {name: np.zeros(x.shape, x.dtype) for name, x in target.items()}
        mine = ok.restore(path, as_numpy=True) if jax.process_index() == 0 else zeros
        return multihost_utils.broadcast_one_to_all(mine)

    ways = {
        "host to each device": lambda: read(whole),
        "to one, then on": lambda: jax.device_put(read(None), whole),
        "each process reads": lambda: read(whole),
        "one reads, broadcasts": one_reads,
    }
    multihost_utils.sync_global_devices("start")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    jax.block_until_ready(ways[way]())
    return time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def measure_way(processes: int, path: str, way: str) -> tuple[float, int]:
    """The slowest process, and the memory of all."""
    ended = [one.value for one in run_processes(processes, restore, path, way, devices=DEVICES)]
    return max(seconds for seconds, _ in ended), sum(nbytes for _, nbytes in ended)


def main(rounds: int) -> None:
    """Print both comparisons, then what must hold."""
    nbytes, rows, verdicts = LEAVES * ROWS * COLUMNS * 4, [], []
    measure.warm_memory(2_000_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        measure.python(__file__, "write", path)
        for processes, ours, other in [
            (1, "host to each device", "to one, then on"),
            (2, "each process reads", "one reads, broadcasts"),
        ]:
            ways = {way: lambda way=way, n=processes: measure_way(n, path, way) for way in (ours, other)}
            results = measure.interleaved(ways, rounds)
            best = {way: [min(column) for column in zip(*runs, strict=True)] for way, runs in results.items()}
            rows += [
                {"processes": processes, "way": way, "seconds": seconds, "memory / data": memory / nbytes}
                for way, (seconds, memory) in best.items()
            ]
            for k, what in enumerate(["time", "memory"]):
                verdicts.append(measure.verdict(f"{ours}: {what} against {other}", best[ours][k] / best[other][k], 1.0))
    print(f"data: {nbytes / measure.MB:.0f} MB, {DEVICES} devices in each process")
    print(measure.table(rows), end="\n\n")
    print(measure.table(verdicts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
