"""Conversions on disk of an Adam state of over 1 GB: time against cp and Orbax, peak memory of each.

python tests/benchmarks/convert.py [ROUNDS] [LAYERS]
"""

import json
import os
import shutil
import sys
import tempfile
import time

import measure

WIDTH, HIDDEN = 2048, 6144


def write(folder: str, layers: str) -> None:
    """Scanned params and their Adam state, random so that compression does not help; and the same, one leaf a layer."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)

    def leaf(*shape: int):
        return jnp.asarray(random.standard_normal(shape, np.float32))

    def state(params: dict) -> dict:
        double, square = (
            {k: {n: f(x) for n, x in sub.items()} for k, sub in params.items()} for f in (lambda x: x * 2, jnp.square)
        )
        adam = optax.ScaleByAdamState(jnp.asarray(3), double, square)
        return {"params": params, "opt_state": (adam, optax.EmptyState()), "step": 3}

    count = int(layers)
    flat = {f"layer_{i}": {"up": leaf(WIDTH, HIDDEN), "down": leaf(HIDDEN, WIDTH)} for i in range(count)}
    ocp.PyTreeCheckpointer().save(f"{folder}/flat", state(flat))
    stacked = {n: jnp.stack([layer[n] for layer in flat.values()]) for n in ("up", "down")}
    ocp.PyTreeCheckpointer().save(f"{folder}/stacked", {"params": {"layers": stacked}})


def ours(source: str, destination: str, *rules: str, **options: object):
    import orbaxkit as ok

    made = {
        "params": lambda: ok.select("params/**"),
        "unstack": lambda: ok.unstack("params/layers", into="layer_{i}", axis=0),
        "cast": lambda: ok.cast("bfloat16"),
        "transpose": lambda: ok.transpose("params/**"),
    }
    convert, transforms = ok.convert, [made[rule]() for rule in rules]
    return lambda: convert(source, destination, *transforms, **options)


def strip(folder: str, out: str):
    return ours(f"{folder}/flat", out, "params")


def unstack(folder: str, out: str):
    return ours(f"{folder}/stacked", out, "unstack")


def cast(folder: str, out: str):
    return ours(f"{folder}/flat", out, "params", "cast")


def transpose(folder: str, out: str):
    return ours(f"{folder}/flat", out, "params", "transpose")


def limited(folder: str, out: str):
    return ours(f"{folder}/stacked", out, "unstack", memory_limit="64MB")


def export(folder: str, out: str):
    return ours(f"{folder}/flat", out, "params", format="safetensors")


def orbax_v1(folder: str, out: str):
    """Load the params with a partial load, save them."""
    import jax
    from orbax.checkpoint.experimental import v1

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options = v1.options.PyTreeOptions(loading=v1.options.PyTreeOptions.Loading(partial_load=True))
    with open(f"{folder}/flat/_METADATA") as file:
        layers = range(len(json.load(file)["tree_metadata"]) // 6)

    def leaf(*shape: int):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def run():
        with v1.Context(pytree_options=options):
            wanted = {
                "params": {f"layer_{i}": {"up": leaf(WIDTH, HIDDEN), "down": leaf(HIDDEN, WIDTH)} for i in layers}
            }
            params = v1.load(f"{folder}/flat", wanted, checkpointable_name=None)["params"]
            v1.save(out, {"params": params})

    return run


def copy(folder: str, out: str):
    """cp of what the strip wrote, and fsync."""

    def run():
        shutil.copytree(f"{folder}/copied", out)
        for root, _, files in os.walk(out):
            for name in [*files, "."]:
                number = os.open(os.path.join(root, name), os.O_RDONLY)
                os.fsync(number)
                os.close(number)

    return run


WAYS = {
    "strip": strip,
    "cp + fsync": copy,
    "orbax v1 load, save": orbax_v1,
    "unstack": unstack,
    "unstack, 64 MB limit": limited,
    "cast": cast,
    "transpose": transpose,
    "export to safetensors": export,
}


def child(way: str, folder: str, out: str) -> None:
    """Convert once; print seconds and the peak before and after."""
    import resource

    run = WAYS[way](folder, out)
    if way not in ("cp + fsync", "orbax v1 load, save"):
        import numpy  # noqa: F401
        import tensorstore  # noqa: F401
        import zstandard  # noqa: F401

        import orbaxkit._checkpoint
        import orbaxkit.formats.orbax_sink  # noqa: F401
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    before, start = peak(), time.perf_counter()
    run()
    print(json.dumps({"seconds": time.perf_counter() - start, "base": before, "peak": peak()}))


def timed(way: str, folder: str) -> dict:
    """One child process, its output removed again; its whole time too."""
    out = f"{folder}/out"
    done = measure.python(__file__, "child", way, folder, out, env={"JAX_PLATFORMS": "cpu"})
    shutil.rmtree(out)
    return {**done.report, "process": done.seconds}


def main(rounds: int, layers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure.warm_memory(4_000_000_000)
        measure.python(__file__, "write", folder, str(layers), env={"JAX_PLATFORMS": "cpu"})
        measure.python(__file__, "child", "strip", folder, f"{folder}/copied")
        half = f"{folder}/half"
        os.mkdir(half)
        measure.python(__file__, "write", half, str(layers // 2), env={"JAX_PLATFORMS": "cpu"})
        small = min((timed("strip", half) for _ in range(rounds)), key=lambda run: run["peak"])
        runs = measure.interleaved({way: (lambda way=way: timed(way, folder)) for way in WAYS}, rounds)
    best = {way: {key: min(run[key] for run in some) for key in some[0]} for way, some in runs.items()}
    rows = [
        {
            "way": way,
            "seconds": r["seconds"],
            "whole process": r["process"],
            "above imports MB": (r["peak"] - r["base"]) / measure.MB,
        }
        for way, r in best.items()
    ]
    leaf = WIDTH * HIDDEN * 4
    print(f"params: {2 * layers * leaf / measure.MB:.0f} MB in {2 * layers} leaves, or {2} of {layers} layers")
    print(measure.table(rows), end="\n\n")
    above = {way: (r["peak"] - r["base"]) / measure.MB for way, r in best.items()}
    strip, whole = best["strip"], layers * leaf / measure.MB
    print(
        measure.table(
            [
                measure.verdict("strip against cp + fsync", strip["seconds"] / best["cp + fsync"]["seconds"], 1.6),
                measure.verdict(
                    "strip, as a process, against Orbax v1",
                    strip["process"] / best["orbax v1 load, save"]["process"],
                    0.35,
                ),
                measure.verdict("strip: MB above imports", above["strip"], 100),
                measure.verdict(
                    "strip: MB more above imports than for half the checkpoint",
                    above["strip"] - (small["peak"] - small["base"]) / measure.MB,
                    10,
                ),
                measure.verdict(
                    "strip: peak of the process against half the checkpoint's", strip["peak"] / small["peak"], 1.1
                ),
                measure.verdict("unstack: MB above imports", above["unstack"], 2 * whole + 100),
                measure.verdict(
                    "transpose, which re-chunks: MB above imports", above["transpose"], 2 * leaf / measure.MB + 100
                ),
                measure.verdict("unstack, 64 MB limit: MB above imports", above["unstack, 64 MB limit"], 64 + 100),
            ]
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "child"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        numbers = [int(text) for text in sys.argv[1:]]
        main(*(numbers + [3, 4][len(numbers) :]))
