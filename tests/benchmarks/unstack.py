"""Unstack 12 leaves of 96 layers in memory, against one jax.jit over the tree and against copying the bytes with numpy.

python tests/benchmarks/unstack.py [ROUNDS]
"""

import json
import sys
import time

import measure

LEAVES, LAYERS = 12, 96
LAYER_KB = {"64 KB layers": 64, "1 MB layers": 1024}


def tree(layer_kb: int) -> dict:
    """Twelve leaves of different widths, about `layer_kb` each layer."""
    import jax.numpy as jnp

    width = layer_kb * 1024 // 4 // 64
    return {"layers": {f"w{k}": jnp.ones((LAYERS, 64 + k, width), jnp.float32) for k in range(LEAVES)}}


def unstack_with_jit(layers: dict) -> dict:
    """What people write: index every leaf inside one jitted function."""
    import jax

    return jax.jit(lambda t: [jax.tree.map(lambda x, i=i: x[i], t) for i in range(LAYERS)])(layers)


def best(run, rounds: int) -> float:
    """The fastest of several runs."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        out = run()
        times.append(time.perf_counter() - start)
        del out
    return min(times)


def child(way: str, layer_kb: str, rounds: str) -> None:
    """Seconds of the first call and of the best of later ones."""
    import jax
    import numpy as np

    import orbaxkit as ok

    layers = jax.block_until_ready(tree(int(layer_kb)))
    unstack, hosts = ok.unstack("layers", into="layer_{i}", axis=0), [np.asarray(x) for x in jax.tree.leaves(layers)]
    run = {
        "orbaxkit": lambda: jax.block_until_ready(ok.apply(layers, unstack)),
        "jax.jit": lambda: jax.block_until_ready(unstack_with_jit(layers)),
        "numpy copy": lambda: [[x[i].copy() for i in range(LAYERS)] for x in hosts],
    }[way]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))
    start = time.perf_counter()
    out = run()
    first = time.perf_counter() - start
    del out
    later = first if way == "jax.jit" else best(run, int(rounds))
    print(json.dumps({"first": first, "later": later}))


def main(rounds: int) -> None:
    measure.warm_memory(4_000_000_000)
    rows, verdicts = [], []
    for label, kb in LAYER_KB.items():
        ways = ("orbaxkit", "numpy copy") + (("jax.jit",) if kb == 64 else ())
        found = {way: measure.python(__file__, "child", way, str(kb), str(rounds)).report for way in ways}
        rows += [
            {"layers": label, "way": way, "first s": r["first"], "later s": r["later"]} for way, r in found.items()
        ]
        limit = 2.5 if kb == 64 else 1.3
        ratio = found["orbaxkit"]["later"] / found["numpy copy"]["later"]
        verdicts.append(measure.verdict(f"steady state against a numpy copy, {label}", ratio, limit))
        if "jax.jit" in found:
            first = found["orbaxkit"]["first"] / found["jax.jit"]["first"]
            verdicts.append(measure.verdict("first call against one jax.jit over the tree", first, 0.1))
    print(measure.table(rows), end="\n\n")
    print(measure.table(verdicts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
