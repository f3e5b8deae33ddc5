"""A destination is whole or not there, whatever happens on the way."""

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from formats.copying import TreeSource, save

from orbaxkit._checkpoint import open_checkpoint
from orbaxkit.errors import CheckpointError, CheckpointWarning
from orbaxkit.formats.orbax_sink import OrbaxSink
from orbaxkit.formats.safetensors_sink import SafetensorsSink
from orbaxkit.formats.staging import Staging, leftovers


def begin(path: Path, **how: object) -> Staging:
    return Staging.begin(str(path), **{"needed_bytes": 1, **how})


def test_nothing_stands_until_the_end(tmp_path):
    staging = begin(tmp_path / "deep/er/out")
    Path(staging.temporary, "file").write_text("x")
    assert not (tmp_path / "deep/er/out").exists()
    assert staging.commit() == tmp_path / "deep/er/out"
    assert (tmp_path / "deep/er/out/file").read_text() == "x"
    assert os.listdir(tmp_path / "deep/er") == ["out"]


def test_what_was_begun_leaves_no_trace_when_given_up(tmp_path):
    staging = begin(tmp_path / "deep/er/out")
    Path(staging.temporary, "file").write_text("x")
    staging.discard()
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_folders_made_on_the_way_stay_where_others_use_them(tmp_path):
    staging = begin(tmp_path / "deep/er/out")
    (tmp_path / "deep/other").touch()
    staging.discard()
    assert os.listdir(tmp_path / "deep") == ["other"]


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_a_destination_that_stands_is_refused(kind, tmp_path):
    path = tmp_path / "out"
    if kind == "file":
        path.touch()
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="the destination exists") as caught:
        begin(path)
    assert "--overwrite" in str(caught.value)
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    staging = begin(tmp_path / "out")
    Path(staging.temporary, "file").touch()
    staging.commit()
    assert os.listdir(tmp_path / "out") == ["file"]


@pytest.mark.parametrize("is_folder", [True, False])
def test_overwriting_sets_the_old_one_aside_until_the_new_one_stands(is_folder, tmp_path):
    path = tmp_path / "out"
    (path / "old").mkdir(parents=True)
    staging = begin(path, overwrite=True, is_folder=is_folder)
    if not is_folder:
        Path(staging.temporary).touch()
    assert os.listdir(path) == ["old"]
    staging.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert path.is_dir() == is_folder


def test_an_old_one_comes_back_where_the_new_one_cannot_be_put_in_place(tmp_path):
    (tmp_path / "out/old").mkdir(parents=True)
    staging = begin(tmp_path / "out", overwrite=True)
    os.rmdir(staging.temporary)
    with pytest.raises(CheckpointError, match="cannot be written"):
        staging.commit()
    staging.discard()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["old"]


def test_one_that_came_meanwhile_is_not_replaced(tmp_path):
    staging = begin(tmp_path / "out")
    (tmp_path / "out/other").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the destination exists"):
        staging.commit()
    staging.discard()
    assert os.listdir(tmp_path / "out") == ["other"]


def test_leftovers_are_named_and_never_taken_for_a_step(tmp_path):
    save(TreeSource({("w",): np.ones(1)}), OrbaxSink(tmp_path, as_step=2))
    (tmp_path / "2").rename(tmp_path / "3.orbaxkit-tmp-abcdefgh")
    save(TreeSource({("w",): np.ones(1)}), OrbaxSink(tmp_path, as_step=1))
    root = open_checkpoint(tmp_path)
    assert root.steps == (1,)
    assert root.unfinished == ("3.orbaxkit-tmp-abcdefgh",)
    with pytest.warns(CheckpointWarning, match=r"an interrupted run left .*/3\.orbaxkit-tmp-abcdefgh \(remove it"):
        begin(tmp_path / "3").discard()
    (tmp_path / "3.orbaxkit-old-abcdefgh").mkdir()
    with pytest.warns(CheckpointWarning, match="rename it back if you need it"):
        begin(tmp_path / "3").discard()
    assert [Path(path).name for path in leftovers(str(tmp_path / "3"))] == [
        "3.orbaxkit-old-abcdefgh",
        "3.orbaxkit-tmp-abcdefgh",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(tmp_path / "33").discard()


def test_a_destination_inside_a_checkpoint_is_refused(tmp_path):
    save(TreeSource({("w",): np.ones(1)}), OrbaxSink(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="lies inside a checkpoint"):
        begin(tmp_path / "out/d/new")


def test_too_little_room_is_told_before(tmp_path):
    with pytest.raises(CheckpointError, match="bytes of disk are free"):
        begin(tmp_path / "new/out", needed_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sink", [OrbaxSink, SafetensorsSink])
def test_files_that_cannot_grow_are_one_clear_error_and_nothing_stays(sink, tmp_path):
    """As on a full disk: the system takes no more than a megabyte."""
    code = f"""
import resource, numpy as np
from formats.copying import TreeSource, save
from orbaxkit.errors import CheckpointError
from {sink.__module__} import {sink.__name__} as Sink
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sink = Sink({str(tmp_path / "deep/out")!r})
try:
    save(TreeSource({{("w",): np.random.default_rng(0).normal(size=1 << 20)}}), sink)
except CheckpointError as error:
    print(error)
    sink.abort()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", ".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "it cannot be written: File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20
