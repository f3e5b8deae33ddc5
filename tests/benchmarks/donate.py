"""Params-only restore and donated training steps after it, against Orbax v1: peak memory above the imports, and time.

On CPU our arrays are the buffers that were read into: the first donated step deletes them without a warning but reuses
none, so it holds the params twice (2.07 times their bytes; Orbax v1 holds 1.33 times: ratio 1.55) until the next step
frees them. A copy of each leaf into a buffer that XLA allocated is donated in full, and holds one leaf more than the
params (1.17 times with these eight leaves), step included.

python tests/benchmarks/donate.py [ROUNDS]
"""

import json
import sys
import tempfile
import time
import warnings

import measure
from restore_params import orbax_v1, orbaxkit, write


def copied(path: str):
    """Host arrays, each copied into a buffer of XLA's own and dropped before the next."""
    import jax

    import orbaxkit as ok

    restore_params = ok.restore_params

    def load():
        leaves, tree = jax.tree.flatten(restore_params(path, as_numpy=True))
        leaves.reverse()
        out = []
        while leaves:
            out.append(jax.block_until_ready(jax.numpy.array(leaves.pop(), copy=True)))
        return jax.tree.unflatten(tree, out)

    return load


WAYS = {"orbaxkit": orbaxkit, "orbaxkit, leaves copied": copied, "orbax v1": orbax_v1}


def child(way: str, path: str) -> None:
    """Restore, then two donated steps; print the seconds and peaks, what was reused, and whether jax warned."""
    import resource

    import jax

    load = WAYS[way](path)
    step = jax.jit(lambda params: jax.tree.map(lambda x: x * 0.999, params), donate_argnums=0)
    jax.block_until_ready(jax.numpy.array(jax.numpy.ones(4) + 1, copy=True))
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    where = lambda tree: {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}  # noqa: E731
    base, start = peak(), time.perf_counter()
    params = jax.block_until_ready(load())
    seconds, nbytes = time.perf_counter() - start, sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    report = {"seconds": seconds, "restored": (peak() - base) / nbytes}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in ("first", "second"):
            before, start = where(params), time.perf_counter()
            params = jax.block_until_ready(step(params))
            report[f"{count} step"] = time.perf_counter() - start
            report[f"reused, {count}"] = len(before & where(params)) / len(before)
    report["stepped"] = (peak() - base) / nbytes
    report["warned"] = sum("donated" in str(warning.message) for warning in caught)
    print(json.dumps(report))


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, env = f"{folder}/checkpoint", {"JAX_PLATFORMS": "cpu"}
        measure.warm_memory(4_000_000_000)
        measure.python(__file__, "write", path, env=env)
        ways = {way: (lambda way=way: measure.python(__file__, "child", way, path, env=env).report) for way in WAYS}
        runs = measure.interleaved(ways, rounds)
    best = {
        way: {key: (max if key == "warned" else min)(run[key] for run in some) for key in some[0]}
        for way, some in runs.items()
    }
    print("peaks are above the imports, against the params' bytes")
    print(measure.table([{"way": way, **report} for way, report in best.items()]), end="\n\n")
    ours, theirs = best["orbaxkit"], best["orbax v1"]
    rows = [
        measure.verdict("restore: time against Orbax v1", ours["seconds"] / theirs["seconds"], 0.5),
        measure.verdict("restore: peak against the params' bytes", ours["restored"], 1.1),
        measure.verdict("with a donated step: peak against the params' bytes", ours["stepped"], 1.1),
    ]
    print(measure.table(rows))
    print(f"with a donated step: peak against Orbax v1 {ours['stepped'] / theirs['stepped']:.3g}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2])
    elif sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
