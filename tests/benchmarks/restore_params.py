"""Params-only restore from an Adam state of over 1 GB, against Orbax's partial loads (v1 and v0).

python tests/benchmarks/restore_params.py [ROUNDS]
"""

import json
import sys
import tempfile
import time

import measure

LAYERS, WIDTH, HIDDEN = 4, 2048, 6144  # 8 leaves, 403 MB of params, 1.2 GB with mu and nu


def write(folder: str) -> None:
    """Params and their Adam state, random so that compression does not help, as Orbax v1 writes them by default."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)

    def leaf(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    params = {f"layer_{i}": {"up": leaf(WIDTH, HIDDEN), "down": leaf(HIDDEN, WIDTH)} for i in range(LAYERS)}
    adam = optax.ScaleByAdamState(
        jnp.asarray(3), jax.tree.map(lambda x: x * 2, params), jax.tree.map(jnp.square, params)
    )
    ocp.PyTreeCheckpointer().save(folder, {"params": params, "opt_state": (adam, optax.EmptyState()), "step": 3})


def abstract(sharding: object) -> dict:
    """What the caller of a partial load knows beforehand."""
    import jax
    import numpy as np

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    return {f"layer_{i}": {"up": leaf(WIDTH, HIDDEN), "down": leaf(HIDDEN, WIDTH)} for i in range(LAYERS)}


def orbaxkit(path: str):
    import orbaxkit as ok

    restore_params = ok.restore_params  # public names load on first use: not what is timed
    return lambda: restore_params(path)


def orbax_v1(path: str):
    import jax
    from orbax.checkpoint.experimental import v1

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options = v1.options.PyTreeOptions(loading=v1.options.PyTreeOptions.Loading(partial_load=True))

    def load():
        with v1.Context(pytree_options=options):
            return v1.load(path, {"params": abstract(sharding)}, checkpointable_name=None)["params"]

    return load


def orbax_v0(path: str):
    import jax
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def load():
        item = {"params": abstract(sharding)}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
        return ocp.PyTreeCheckpointer().restore(path, args=args)["params"]

    return load


WAYS = {"orbaxkit": orbaxkit, "orbax v1": orbax_v1, "orbax v0": orbax_v0}


def child(way: str, path: str) -> None:
    """Restore once in this process; print seconds, the peak before and after, bytes read, a checksum."""
    import resource

    import jax

    load = WAYS[way](path)
    jax.block_until_ready(jax.numpy.ones(4) + 1)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    read_before = measure.bytes_read()
    before, start = peak(), time.perf_counter()
    params = jax.block_until_ready(load())
    seconds, after = time.perf_counter() - start, peak()
    leaves = jax.tree.leaves(params)
    report = {
        "seconds": seconds,
        "base": before,
        "peak": after,
        "read": measure.bytes_read() - read_before,
        "sum": float(sum(leaf.ravel()[::997].sum() for leaf in leaves)),
        "nbytes": sum(leaf.nbytes for leaf in leaves),
    }
    print(json.dumps(report))


def stored(path: str) -> None:
    """Print the stored bytes of the params."""
    import orbaxkit as ok

    specs = ok.open(path).specs
    print(json.dumps(sum(spec.stored_bytes for name, spec in specs.items() if name.startswith("params/"))))


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        measure.warm_memory(4_000_000_000)
        measure.python(__file__, "write", path)
        wanted = measure.python(__file__, "stored", path).report
        runs = measure.interleaved(
            {w: (lambda w=w: measure.python(__file__, "child", w, path).report) for w in WAYS}, rounds
        )
    best = {way: {key: min(run[key] for run in some) for key in some[0]} for way, some in runs.items()}
    rows = [
        {
            "way": way,
            "seconds": r["seconds"],
            "peak MB": r["peak"] / measure.MB,
            "above imports MB": (r["peak"] - r["base"]) / measure.MB,
            "read MB": r["read"] / measure.MB,
        }
        for way, r in best.items()
    ]
    print(f"params: {best['orbaxkit']['nbytes'] / measure.MB:.0f} MB, stored in {wanted / measure.MB:.0f} MB")
    print(measure.table(rows), end="\n\n")
    ours, theirs = best["orbaxkit"], best["orbax v1"]
    if ours["sum"] != theirs["sum"]:
        sys.exit("the params differ")
    print(
        measure.table(
            [
                measure.verdict("time against Orbax v1", ours["seconds"] / theirs["seconds"], 0.5),
                measure.verdict("peak memory against Orbax v1", ours["peak"] / theirs["peak"], 0.9),
                measure.verdict(
                    "peak above imports against the params' bytes", (ours["peak"] - ours["base"]) / ours["nbytes"], 1.1
                ),
                measure.verdict("bytes read against the params' stored bytes", ours["read"] / wanted, 1.02),
            ]
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "child", "stored"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
