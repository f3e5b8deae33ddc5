"""Inspect and plan a very large train state from its metadata. `tests/benchmarks/scale.py` has the full size."""

import math
from dataclasses import replace

import pytest
import tensorstore as ts
from scale import llama

import orbaxkit as ok
from orbaxkit.optimizer.zeroing import plan_zeroing

MIDDLE = replace(llama.Model(), processes=64)


@pytest.fixture(scope="module", params=[False, True], ids=["one_by_one", "scanned"])
def model(request):
    return replace(llama.SMALL, is_scanned=request.param)


@pytest.fixture(scope="module")
def item(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("item")
    llama.write(folder, model)
    return folder


def test_the_store_is_one_that_tensorstore_reads(item, model):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    keys = store.list().result()
    arrays = llama.train_state(model)
    assert len(set(keys)) == len(keys) == sum(1 + (1 if a.axis is None else model.processes) for a in arrays)


def test_every_leaf_is_there(item, model):
    specs = ok.open(item).specs
    arrays = {"/".join(map(str, array.path)): array for array in llama.train_state(model)}
    assert {name: spec.shape for name, spec in specs.items() if spec.kind == "array"} == {
        name: array.shape for name, array in arrays.items()
    }
    for name, array in arrays.items():
        stored = specs[name].stored_bytes
        assert (
            0.9 * specs[name].nbytes
            < stored
            <= specs[name].nbytes
            + 16 * math.prod(size // chunk for size, chunk in zip(array.shape, specs[name].chunk_shape, strict=True))
        )


def test_values_lie_within_their_files(item):
    source = ok.open(item).source
    assert not source.problems(source.specs)


def test_layers_one_by_one_are_those_that_were_scanned(tmp_path):
    for name, is_scanned in (("scanned", True), ("apart", False)):
        (tmp_path / name).mkdir()
        llama.write(tmp_path / name, replace(llama.SMALL, is_scanned=is_scanned))
    plan = ok.plan(tmp_path / "scanned", ok.unstack("params/layers", into="layers_{i}", axis=0))
    apart = ok.open(tmp_path / "apart").specs
    assert {name: str(spec) for name, spec in plan.specs.items()} == {name: str(spec) for name, spec in apart.items()}


def test_400_billion_parameters(tmp_path):
    """All layers, 218,000 chunks; nodes are cut where TensorStore would cut them at full size."""
    llama.write(tmp_path, MIDDLE)
    ckpt = ok.open(tmp_path)
    assert ckpt.specs["params/layers_125/mlp/up/kernel"].shape == (16384, 53248)
    assert sum(spec.parameters for name, spec in ckpt.specs.items() if name.startswith("params/")) > 400e9
    plan = ok.plan(ckpt, ok.stack("params/layers_{i}", into="layers", axis=0))
    assert plan.specs["opt_state/0/nu/layers/mlp/up/kernel"].shape == (126, 16384, 53248)
    zeroing = plan_zeroing(ckpt.specs, ("step",))
    assert len(zeroing.names) == 2 * 1137 + 1
