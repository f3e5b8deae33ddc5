"""Two processes write one checkpoint to gs:// and s3://: each its part, one the tree that joins them."""

import numpy as np
import pytest
from processes.harness import run_processes
from remote.uploading import convert_all
from servers.object_server import ObjectServer

import orbaxkit as ok

pytest_plugins = ["servers.fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore::orbaxkit.CheckpointWarning")


def test_two_processes_upload_one_checkpoint(store_url: str, object_server: ObjectServer, tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"layer_{i}": rng.random((500, 600), np.float32) for i in range(6)} | {"name": "pi0", "step": 7}
    source = ok.convert(tree, tmp_path / "source")
    ended = run_processes(2, convert_all, str(source), store_url, timeout=90)
    for outcomes in (one.value for one in ended):
        assert outcomes[:2] == [f"{store_url}/copy", f"{store_url}/run/3"]
        assert "the destination exists" in outcomes[2]
        assert "on fire" in outcomes[3]
    objects = object_server.objects[store_url.partition("://")[2]]
    assert not [key for key in objects if key.startswith("failing")]
    for path, item in ((f"{store_url}/copy", "copy"), (f"{store_url}/run", "run/3/default")):
        assert not ok.diff(path, source, values=True)
        assert ok.verify(path)
        for part in (0, 1):
            assert any(key.startswith(f"{item}/ocdbt.process_{part}/d/") for key in objects)
    order = [request.key for request in object_server.log if request.method in ("PUT", "POST")]
    assert order.index("copy/_METADATA") < order.index("copy/manifest.ocdbt") < order.index("copy/commit_success.txt")
