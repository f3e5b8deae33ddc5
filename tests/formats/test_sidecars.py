"""The small files beside an item's arrays: how many of them are read."""

import json

import numpy as np
import pytest
from formats.golden_cases import entry, write_array, write_metadata

from orbaxkit._checkpoint import open_checkpoint


@pytest.fixture
def item(tmp_path):
    """A tree of a weight and of two PRNG keys, saved by three processes: each wrote one key's metadata."""
    for name, array in {"w": np.ones(2, np.float32), "a": np.ones(2, np.uint32), "b": np.ones(2, np.uint32)}.items():
        write_array(tmp_path, name, array)
    write_metadata(tmp_path, *[entry([name], "jax.Array", write_shape=[2]) for name in "wab"])
    (tmp_path / "array_metadatas").mkdir()
    for process, name in enumerate("wab"):
        extra = None if name == "w" else {"random_key_impl": "threefry2x32"}
        found = {"param_name": name, "write_shape": [2], "chunk_shape": [2], "ext_metadata": extra}
        text = json.dumps({"array_metadatas": [{"array_metadata": found}]})
        (tmp_path / "array_metadatas" / f"process_{process}").write_text(text)
    return tmp_path


def test_processes_are_asked_until_every_key_is_known(item):
    specs = open_checkpoint(item).specs
    assert [specs[name].kind for name in "wab"] == ["array", "key", "key"]


def test_no_more_processes_are_asked_than_needed(item):
    (item / "array_metadatas" / "process_3").write_text("not read")
    assert not any("ignored" in note for note in open_checkpoint(item).notes)
