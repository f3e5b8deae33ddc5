"""Safetensors export of 805 MB of params, against orbaxport in an environment of its own.

    python -m venv /somewhere && /somewhere/bin/pip install orbaxport
    python tests/benchmarks/orbaxport.py /somewhere/bin/python [ROUNDS]

The step is laid out as Tunix does, which is what orbaxport reads: an item `model_params`. Both write the same leaves.
"""

import os
import shutil
import sys
import tempfile

import measure

LAYERS, WIDTH, HIDDEN = 8, 2048, 6144  # 16 leaves, 805 MB


def write(path: str) -> None:
    """Random params."""
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {
        f"layer_{i}": {name: jnp.asarray(random.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
        for i in range(LAYERS)
    }
    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(params)))


def same(a: str, b: str) -> None:
    """Both files hold the same arrays, whatever they are called."""
    import numpy as np
    from safetensors.numpy import load_file

    left, right = (sorted(load_file(path).values(), key=lambda x: x.tobytes()[:64]) for path in (a, b))
    assert len(left) == len(right) == 2 * LAYERS, (len(left), len(right))
    assert all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


def main(python: str, rounds: int) -> None:
    command = os.path.join(os.path.dirname(python), "orbaxport")
    if not os.path.exists(command):
        print(f"SKIPPED: no {command}; orbaxport is compared only where it is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, ours, theirs = f"{folder}/source", f"{folder}/ours.safetensors", f"{folder}/theirs.safetensors"
        measure.warm_memory(3_000_000_000)
        env = {"JAX_PLATFORMS": "cpu"}
        measure.python(__file__, "write", source, env=env)

        def fresh(path: str, *words: str) -> measure.Run:
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
            return measure.run(*words, env=env)

        ways = {
            "orbaxkit": lambda: fresh(ours, sys.executable, "-m", "orbaxkit", "convert", f"{source}/1", ours),
            "orbaxport": lambda: fresh(theirs, command, "-i", f"{source}/1", "-o", theirs, "--key-map", "none"),
        }
        runs = measure.interleaved(ways, rounds)
        measure.python(__file__, "same", ours, theirs)
    best = {way: (min(r.seconds for r in some), min(r.peak_bytes for r in some)) for way, some in runs.items()}
    print(
        measure.table([{"way": w, "seconds": s, "peak MB": p / measure.MB} for w, (s, p) in best.items()]), end="\n\n"
    )
    (seconds, peak), (their_seconds, their_peak) = best["orbaxkit"], best["orbaxport"]
    rows = [
        measure.verdict("time against orbaxport", seconds / their_seconds, 0.3),
        measure.verdict("peak memory against orbaxport", peak / their_peak, 0.15),
    ]
    print(measure.table(rows))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "same"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 3)
