"""The checkpoints that tests restore, written by plain Orbax. Tests refer to the recipes F1, F2… by these names."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp


def save(path: Path, tree: Any, **options: Any) -> Path:
    """Save a tree as a bare PyTree checkpoint."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def f1_tree(kernel: Any = None) -> dict[str, Any]:
    """F1: dense params, chain(clip, adamw) state after no update, step 3."""
    kernel = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) if kernel is None else kernel
    params = {"dense": {"kernel": kernel, "bias": jnp.ones(kernel.shape[1])}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "opt_state": tx.init(params), "step": 3}


_F2 = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
w, b = np.arange(64, dtype=np.float32).reshape(8, 8), np.arange(8, dtype=np.float32)
tree = {"w": put(w, "data", "model"), "b": put(b)}
ocp.PyTreeCheckpointer().save(sys.argv[1], tree)
"""


def save_f2(path: Path) -> Path:
    """F2: saved by a child process on eight devices as 2 x 4, `w` sharded over both axes, `b` replicated."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _F2, str(path)], check=True, env=env, capture_output=True)
    return path


def f6_tree() -> dict[str, Any]:
    """F6: four scanned layers along axis 1."""
    return {
        "layers": {
            "w": np.arange(8 * 4 * 16, dtype=np.float32).reshape(8, 4, 16),
            "norm": np.arange(32.0, dtype=np.float32).reshape(8, 4),
        },
        "embed": np.ones((10, 8), np.float32),
    }
