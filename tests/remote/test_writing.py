"""Convert to gs:// and s3://: whole or no checkpoint at all, and what stands there stays."""

import os
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from servers.object_server import Fault, ObjectServer

import orbaxkit as ok
from orbaxkit.cli import main
from orbaxkit.formats.uploading import Upload

pytest_plugins = ["servers.fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore::orbaxkit.CheckpointWarning")


def tree(seed: int = 0):
    rng = np.random.default_rng(seed)
    params = {f"layer_{i}": rng.random((60, 60), np.float32) for i in range(10)}
    return {"params": params, "name": "pi0", "step": 7}


def held_below(server: ObjectServer, url: str) -> dict[str, bytes]:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return {
        key[len(prefix) + 1 :]: data for key, data in server.objects[bucket].items() if key.startswith(f"{prefix}/")
    }


def download(server: ObjectServer, url: str, folder: Path) -> Path:
    for name, data in held_below(server, url).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(autouse=True)
def nothing_stays_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()
    yield
    assert not list((tmp_path / "system").iterdir())


def test_orbax_reads_what_was_written(store_url, object_server, tmp_path):
    made = ok.convert(tree(), f"{store_url}/out")
    assert os.fspath(made) == f"{store_url}/out"
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(download(object_server, f"{store_url}/out", tmp_path / "copy"))
    np.testing.assert_array_equal(restored["params"]["layer_3"], tree()["params"]["layer_3"])
    assert not ok.diff(tree(), made, values=True)
    assert ok.verify(made)


@pytest.mark.parametrize("options", [{}, {"as_step": 3}, {"format": "safetensors", "max_shard_size": "50KB"}], ids=str)
def test_no_part_of_an_upload_is_a_checkpoint(store_url, object_server, options):
    """A process may die after any file; once the manifest is there, all that is needed is."""
    ok.convert(tree(), f"{store_url}/out", **options)
    order = [request.key for request in object_server.log if request.method in ("PUT", "POST")]
    objects = object_server.objects[store_url.partition("://")[2]]
    for key in reversed(order):
        del objects[key]
        if key.endswith(("commit_success.txt", "_CHECKPOINT_METADATA")):
            continue
        if options.get("format") and any(name.endswith(".safetensors") for name in objects):
            continue  # files of safetensors are each whole
        with pytest.raises(ok.CheckpointError):
            ok.restore(f"{store_url}/out")


@pytest.mark.parametrize("after", range(1, 8))
def test_an_upload_that_breaks_off_leaves_no_checkpoint(store_url, object_server, after):
    for method in ("PUT", "POST"):
        object_server.faults.append(Fault(403, key="out/", method=method, every=after))
    with pytest.raises(ok.CheckpointError, match="access is denied"):
        ok.convert(tree(), f"{store_url}/out")
    object_server.faults = []
    assert not held_below(object_server, f"{store_url}/out")
    ok.convert(tree(), f"{store_url}/out")


def test_steps_safetensors_and_layouts(store_url, object_server):
    ok.convert(tree(1), f"{store_url}/run", as_step=1)
    made = ok.convert(tree(2), f"{store_url}/run", as_step=2)
    assert os.fspath(made) == f"{store_url}/run/2"
    assert ok.open(f"{store_url}/run").steps == (1, 2)
    for name, options in (("one.safetensors", {}), ("many", {"format": "safetensors", "max_shard_size": "50KB"})):
        made = ok.convert(f"{store_url}/run", f"{store_url}/{name}", **options)
        assert not ok.diff(made, f"{store_url}/run", values=True)
    with pytest.raises(ok.CheckpointError, match="is a checkpoint itself"):
        ok.convert(tree(), f"{store_url}/run/2/default", as_step=3)


def test_from_store_to_disk_stored_bytes_are_copied(store_url, object_server, tmp_path):
    ok.convert(tree(), f"{store_url}/out")
    object_server.clear_log()
    made = ok.convert(f"{store_url}/out", tmp_path / "back", ok.rename({"params/{x}": "model/{x}"}))
    assert ok.verify(made)
    assert len([request for request in object_server.log if "/d/" in request.key]) <= 4
    assert (
        ok.open(made).specs["model/layer_0"].stored_bytes
        == ok.open(f"{store_url}/out").specs["params/layer_0"].stored_bytes
    )


def test_what_lies_beside_the_tree_comes_along(store_url, object_server, tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            3,
            args=ocp.args.Composite(params=ocp.args.StandardSave(tree()["params"]), notes=ocp.args.JsonSave({"a": 1})),
        )
        manager.wait_until_finished()
    object_server.put_tree(store_url.partition("://")[2], "run", tmp_path / "run")
    made = ok.convert(f"{store_url}/run", tmp_path / "copy")
    assert (Path(made) / "notes/metadata").read_bytes() == (tmp_path / "run/3/notes/metadata").read_bytes()
    ok.convert(tmp_path / "run", f"{store_url}/again")
    assert "notes/metadata" in held_below(object_server, f"{store_url}/again")


def test_what_stands_there_stays(store_url, object_server):
    ok.convert(tree(), f"{store_url}/out")
    before = dict(held_below(object_server, f"{store_url}/out"))
    with pytest.raises(ok.CheckpointError, match="the destination exists"):
        ok.convert(tree(1), f"{store_url}/out")
    with pytest.raises(ok.CheckpointError, match="no rename"):
        ok.convert(tree(1), f"{store_url}/out", overwrite=True)
    with pytest.raises(ok.OrbaxkitError, match="is the source"):
        ok.convert(f"{store_url}/out", f"{store_url}/out")
    assert held_below(object_server, f"{store_url}/out") == before


def test_on_the_command_line(store_url, object_server, tmp_path, capsys):
    ok.convert(tree(), tmp_path / "here")
    assert main(["convert", str(tmp_path / "here"), f"{store_url}/out", "--select", "params/**"]) == 0
    assert f"{store_url}/out" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "here"), f"{store_url}/out"]) == 2
    assert "the destination exists" in capsys.readouterr().err


def test_data_files_are_cut_to_what_may_be_in_memory(store_url, object_server, monkeypatch):
    monkeypatch.setattr(Upload, "file_bytes", 20_000)
    made = ok.convert(tree(), f"{store_url}/out")
    sizes = [len(data) for name, data in held_below(object_server, f"{store_url}/out").items() if name.startswith("d/")]
    assert len(sizes) > 3
    assert max(sizes) < 20_000 + 60 * 60 * 4
    assert not ok.diff(made, tree(), values=True)
