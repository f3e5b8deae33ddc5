"""Stored values that look alike and are not: a zarr 3 shard ends in an index, even that of one chunk."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cases import save

import orbaxkit as ok

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

LAYERS = np.random.default_rng(0).standard_normal((8, 16, 32), np.float32)


def save_by_layer(path: Path, **options: Any) -> Path:
    """Eight layers on eight devices: the stored values are those of one layer each, and shards where zarr 3 is used."""
    mesh = jax.make_mesh((8,), ("layer",))
    sharded = jax.device_put(LAYERS, jax.NamedSharding(mesh, jax.P("layer")))
    return save(path, {"w": sharded, "by_half": jax.device_put(LAYERS[:2])}, **options)


STORAGE: dict[str, dict[str, Any]] = {
    "zarr2": {},
    "zarr3": {"use_zarr3": True},
    "plain zarr2": {"use_ocdbt": False},
    "plain zarr3": {"use_zarr3": True, "use_ocdbt": False},
}
UNSTACK = ok.unstack("w", into="layer_{i}", axis=0)


@pytest.mark.parametrize("storage", STORAGE)
def test_layers_stored_one_by_one_are_unstacked_and_read_back(tmp_path: Path, storage: str):
    source = save_by_layer(tmp_path / "in", **STORAGE[storage])
    spec = ok.open(source).specs["w"]
    assert spec.chunk_shape == (1, 16, 32)
    assert (spec.shard_shape is not None) == ("zarr3" in storage)
    written = ok.convert(source, tmp_path / "out", UNSTACK, ok.drop("by_half"))
    found, theirs = ok.restore(written, as_numpy=True), ocp.PyTreeCheckpointer().restore(written)
    for i in range(8):
        assert np.array_equal(found[f"layer_{i}"], LAYERS[i])
        assert np.array_equal(theirs[f"layer_{i}"], LAYERS[i])


@pytest.mark.parametrize("storage", STORAGE)
def test_layers_are_stacked_again_and_read_back(tmp_path: Path, storage: str):
    apart = save(tmp_path / "in", {f"layer_{i}": layer for i, layer in enumerate(LAYERS)}, **STORAGE[storage])
    written = ok.convert(apart, tmp_path / "out", ok.stack("layer_{i}", into="w", axis=0))
    assert np.array_equal(ok.restore(written, as_numpy=True)["w"], LAYERS)
    assert np.array_equal(ocp.PyTreeCheckpointer().restore(written)["w"], LAYERS)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("rule", [ok.rename({"w": "x"}), ok.select("w"), ok.rename({"w": "a/b", "by_half": "w"})])
def test_leaves_that_keep_their_grid_keep_their_shards(tmp_path: Path, storage: str, rule: Any):
    source = save_by_layer(tmp_path / "in", **STORAGE[storage])
    written = ok.convert(source, tmp_path / "out", rule)
    assert not ok.diff(source, written, rule, values=True)
    before, after = (ok.open(path).specs for path in (source, written))
    assert {spec.shard_shape for spec in after.values()} <= {spec.shard_shape for spec in before.values()}
