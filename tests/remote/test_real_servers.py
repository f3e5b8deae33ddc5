"""The same against servers that others wrote: moto for S3, fake-gcs-server for Google Cloud Storage."""

import numpy as np
import optax
import pytest
from cases import f1_tree, save
from processes.harness import run_processes
from remote.uploading import convert_all
from servers.real import StoreBucket

import orbaxkit as ok

pytest_plugins = ["servers.fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore::orbaxkit.CheckpointWarning")


def test_read_written_and_back(real_bucket: StoreBucket, tmp_path):
    path = save(tmp_path / "ckpt", f1_tree(np.random.default_rng(0).random((40, 50), np.float32)))
    real_bucket.put_tree("runs/one", path)
    url = f"{real_bucket.url}/runs/one"
    assert not ok.diff(url, path, values=True)
    assert ok.verify(url, hash=True)
    state = ok.reset_optimizer(url, optax.adam(1e-3), keep="step")
    assert int(state["step"]) == 3
    made = ok.convert(url, f"{real_bucket.url}/copy", ok.select("params/**"))
    assert not ok.diff(url, made, ok.select("params/**"), values=True)
    with pytest.raises(ok.CheckpointError, match="the destination exists"):
        ok.convert(url, made)
    with pytest.raises(ok.CheckpointError, match="no such file or folder"):
        ok.open(f"{real_bucket.url}/nothing")


def test_two_processes_upload_one_checkpoint(real_bucket: StoreBucket, tmp_path):
    source = ok.convert({"w": np.arange(500_000.0), "step": 7}, tmp_path / "source")
    ended = run_processes(2, convert_all, str(source), real_bucket.url, timeout=90)
    assert all(one.value[0] == f"{real_bucket.url}/copy" for one in ended)
    assert not ok.diff(f"{real_bucket.url}/copy", source, values=True)
