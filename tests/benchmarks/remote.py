"""A checkpoint behind a store that takes 20 ms to answer: requests, bytes and time, against Orbax with gcsfs.

    pip install gcsfs; python tests/benchmarks/remote.py [ROUNDS]

The store is the one of the tests, in a process of its own: no network, but every request waits.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

sys.path.insert(0, str(Path(__file__).parent.parent))

LATENCY = 0.02
LEAVES, WIDTH = 250, 64
URL = "gs://bench/ckpt"


def write(folder: str) -> None:
    """A train state of 250 params, random, with Adam's moments."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    rng = np.random.default_rng(0)
    params = {f"layer_{i}": jax.numpy.asarray(rng.random((WIDTH, WIDTH), np.float32)) for i in range(LEAVES)}
    tx = optax.adam(1e-3)
    _, opt_state = tx.update(params, tx.init(params), params)
    ocp.PyTreeCheckpointer().save(folder, {"params": params, "opt_state": opt_state, "step": 7})


def serve(folder: str) -> None:
    """Serve it; each line on stdin is answered with what was asked since the one before."""
    from servers.object_server import ObjectServer

    with ObjectServer() as server:
        server.put_tree("bench", "ckpt", folder)
        server.latency = LATENCY
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps([len(server.log), sum(request.sent for request in server.log)]), flush=True)
            server.clear_log()


def orbaxkit_inspect() -> float:
    import orbaxkit as ok

    return float(len(str(ok.open(URL))))


def orbaxkit_params() -> float:
    import jax

    import orbaxkit as ok

    return float(sum(leaf.sum() for leaf in jax.tree.leaves(ok.restore_params(URL))))


def orbax_inspect() -> float:
    import orbax.checkpoint as ocp
    from etils import epath

    return float(len(str(ocp.PyTreeCheckpointer().metadata(epath.Path(URL)))))


def orbax_params() -> float:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=sharding)
    item = {"params": {f"layer_{i}": leaf for i in range(LEAVES)}}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
    restored = ocp.PyTreeCheckpointer().restore(epath.Path(URL), args=args)
    return float(sum(leaf.sum() for leaf in jax.tree.leaves(restored["params"])))


WAYS = (orbaxkit_inspect, orbax_inspect, orbaxkit_params, orbax_params)


def child(way: str) -> None:
    """Do it once in this process; print the seconds without imports, and a checksum."""
    import jax
    import orbax.checkpoint  # noqa: F401

    import orbaxkit

    jax.devices(), orbaxkit.open, orbaxkit.restore_params
    start = time.perf_counter()
    value = globals()[way]()
    print(json.dumps({"seconds": time.perf_counter() - start, "value": value}))


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure.python(__file__, "write", f"{folder}/ckpt")
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", f"{folder}/ckpt"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url = server.stdout.readline().strip()
            env = {"TENSORSTORE_GCS_HTTP_URL": url, "STORAGE_EMULATOR_HOST": url, "JAX_PLATFORMS": "cpu"}
            runs = {way.__name__: [_one(server, way.__name__, env) for _ in range(rounds)] for way in WAYS}
        finally:
            server.stdin.close()
            server.wait()
    best = {name: min(found, key=lambda run: run["seconds"]) for name, found in runs.items()}
    print(measure.table([{"way": name, **run} for name, run in best.items()]), end="\n\n")
    if best["orbaxkit_params"]["value"] != best["orbax_params"]["value"]:
        sys.exit("the params differ")
    pairs = {what: (best[f"orbaxkit_{what}"], best[f"orbax_{what}"]) for what in ("inspect", "params")}
    print(
        measure.table(
            [
                measure.verdict(f"{what}: {key} against Orbax", ours[key] / theirs[key], 1.0)
                for what, (ours, theirs) in pairs.items()
                for key in ("requests", "seconds")
            ]
        )
    )


def _one(server: subprocess.Popen, way: str, env: dict[str, str]) -> dict[str, float]:
    _asked(server)
    report = measure.python(__file__, "child", way, env=env).report
    requests, sent = _asked(server)
    return {"requests": requests, "KB": sent / 1000, **report}


def _asked(server: subprocess.Popen) -> list[int]:
    server.stdin.write("\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "serve", "child"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
