"""README's example for eight hosts, in two processes, on an object store of this machine."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from processes.harness import run_processes
from servers.object_server import ObjectServer

import orbaxkit as ok

pytest_plugins = ["servers.fixtures"]

README = Path(__file__).parents[2] / "README.md"


def run_block(code: str) -> tuple[str, list[tuple[int, ...]], int]:
    """What each process does; what came of it."""
    import jax

    session: dict = {}
    exec(code, session)
    shards = session["params"]["blocks"]["w"].addressable_shards
    return str(session["made"]), [shard.data.shape for shard in shards], jax.process_count()


def test_the_example_for_eight_hosts_runs(object_server: ObjectServer):
    (code,) = re.findall(r"^```py\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert "jax.distributed.initialize()" in code  # which the harness has done
    code = re.sub(r"^jax\.distributed\.initialize.*$", "", code, flags=re.MULTILINE).replace("(8, 4)", "(2, 4)")
    object_server.objects["my-bucket"] = {}
    w = jnp.arange(8.0 * 3 * 4).reshape(8, 3, 4)
    ok.convert({"params": {"blocks": {"w": w}, "head": jnp.ones(3)}}, "gs://my-bucket/runs/pi0")
    ended = run_processes(2, run_block, code, timeout=90)
    assert [one.value for one in ended] == [("gs://my-bucket/bf16", [(2, 3, 4)] * 4, 2)] * 2
    made = ok.restore("gs://my-bucket/bf16", as_numpy=True)
    np.testing.assert_array_equal(made["params"]["blocks"]["w"].astype(np.float32), w)
