"""Restoring: what comes back is what was saved, on the devices that were asked for, or an error that says why not."""

import importlib
import json
import logging
import shutil

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import f1_tree, save, save_f2
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbaxkit as ok
from orbaxkit.errors import CheckpointError, TargetError


def mesh(*shape: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


@pytest.fixture(scope="module")
def f2(tmp_path_factory):
    return save_f2(tmp_path_factory.mktemp("f2") / "ckpt")


def test_a_train_state_comes_back_bit_for_bit(tmp_path):
    tree = f1_tree()
    state = ok.restore(save(tmp_path / "c", tree), target=tree)
    assert jax.tree.structure(state) == jax.tree.structure(tree)
    chex.assert_trees_all_equal(state, tree)


def test_without_a_target_containers_are_dicts_and_lists(tmp_path):
    tree = ok.restore(save(tmp_path / "c", f1_tree()))
    assert isinstance(tree["opt_state"], list)
    assert tree["step"] == 3
    assert isinstance(tree["step"], int)
    assert isinstance(tree["params"]["dense"]["kernel"], jax.Array)


@pytest.mark.parametrize("how", ["str", "path", "relative", "slash", "opened", "epath"])
def test_every_way_to_name_a_checkpoint(tmp_path, monkeypatch, how):
    from etils import epath

    path = save(tmp_path / "c", {"w": jnp.ones(2)})
    monkeypatch.chdir(tmp_path)
    named = {
        "str": str(path), "path": path, "relative": "c", "slash": f"{path}/", "opened": ok.open(path),
        "epath": epath.Path(path),
    }[how]  # fmt: skip
    assert ok.restore(named)["w"].sum() == 2


def test_checkpoint_manager_and_steps(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(2, step)}))
        manager.wait_until_finished()
        assert ok.restore(manager)["w"][0] == 10
        assert ok.restore(manager, step=9)["w"][0] == 9
    with pytest.raises(CheckpointError, match="there is no step 7"):
        ok.restore(tmp_path / "run", step=7)


def test_the_checkpointer_of_the_v1_api_and_its_steps(tmp_path):
    v1 = importlib.import_module("orbax.checkpoint.experimental.v1")
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            save = getattr(checkpointer, "save", checkpointer.save_pytree)  # its name has changed
            save(step, {"params": {"w": jnp.full(3, step)}, "step": step})
        assert ok.restore(checkpointer)["step"] == 2
        np.testing.assert_array_equal(ok.restore_params(checkpointer, step=1)["w"], np.full(3, 1))
        assert len(ok.plan(checkpointer).outputs) == 2


def test_A10_sharded_checkpoint_on_one_device_and_on_four(f2, caplog):
    caplog.set_level(logging.INFO, "orbaxkit")
    tree = ok.restore(f2)
    assert tree["w"].sum() == 2016.0
    assert len(tree["w"].devices()) == 1
    assert any("2x4" in record.message.replace("×", "x") for record in caplog.records)
    sharding = NamedSharding(mesh(2, 2), P("model", "data"))
    target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    w = ok.restore(f2, target=target)["w"]
    assert w.sharding == sharding
    np.testing.assert_array_equal(w, np.arange(64, dtype=np.float32).reshape(8, 8))


@pytest.mark.parametrize("device", ["cuda:0", "TPU_0(process=0,(0,0,0,0))", None], ids=["cuda", "tpu", "deleted"])
def test_A10_F3_a_checkpoint_saved_on_devices_that_are_not_here(tmp_path, device):
    path = save(tmp_path / "c", f1_tree())
    sharding = path / "_sharding"
    if device is None:
        sharding.unlink()
    else:
        one = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": device})
        sharding.write_text(json.dumps(dict.fromkeys(json.loads(sharding.read_text()), one)))
    np.testing.assert_array_equal(ok.restore(path)["params"]["dense"]["kernel"], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), P("data")),
        ((2, 4), P("data", "model")),
        ((2, 4), P(("data", "model"))),
        ((8,), P()),
        ((2, 2), P(None, "model")),
    ],
    ids=str,
)
def test_any_sharding_gives_the_same_values(tmp_path, shape, spec):
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    path = save(tmp_path / "c", {"w": jnp.asarray(value)})
    sharding = NamedSharding(mesh(*shape), spec)
    w = ok.restore(path, sharding=sharding)["w"]
    assert w.sharding == sharding
    np.testing.assert_array_equal(w, value)


def test_A11_an_array_of_another_dtype_is_an_error_unless_the_cast_is_named(tmp_path):
    path = save(tmp_path / "c", {"n": jnp.array([16777217], jnp.int32)})
    target = {"n": jax.ShapeDtypeStruct((1,), jnp.float32)}
    with pytest.raises(TargetError, match=r"n: dtype: found int32\[1\], target wants float32\[1\]"):
        ok.restore(path, target=target)
    assert ok.restore(path, ok.cast("float32", "n"), target=target)["n"][0] == 16777216.0


def test_A11_a_python_step_goes_into_an_int32_target_only_if_it_fits(tmp_path):
    assert ok.restore(save(tmp_path / "a", {"step": 7}), target={"step": jnp.int32(0)})["step"].dtype == jnp.int32
    path = save(tmp_path / "b", {"step": 2**40, "other": 2.5})
    with pytest.raises(TargetError, match="cannot hold") as error:
        ok.restore(path, target={"step": jnp.int32(0), "other": jnp.int32(0)})
    assert [name for name, _ in error.value.leaves] == ["other", "step"]


def test_an_array_step_goes_into_a_python_target(tmp_path):
    path = save(tmp_path / "c", {"step": jnp.int32(12)})
    step = ok.restore(path, target={"step": 0})["step"]
    assert (step, type(step)) == (12, int)


def test_A12_layers_that_were_not_saved_are_listed(tmp_path):
    layers = {f"layer_{i}": {"w": jnp.ones(2)} for i in range(3)}
    target = {"params": {f"layer_{i}": {"w": jnp.zeros(2)} for i in range(5)}}
    with pytest.raises(TargetError, match="layer_3/w: missing") as error:
        ok.restore(save(tmp_path / "c", {"params": layers}), target=target)
    assert [name for name, _ in error.value.leaves] == ["params/layer_3/w", "params/layer_4/w"]


def test_A13_missing_and_unexpected_leaves_need_consent(tmp_path):
    path = save(tmp_path / "c", {"params": {"w": jnp.ones(2), "b": jnp.ones(1)}, "step": 4})
    target = {"params": {"w": jnp.zeros(2), "new": jnp.full(3, 5.0)}, "step": 0}
    with pytest.raises(TargetError) as error:
        ok.restore(path, target=target)
    assert {name for name, _ in error.value.leaves} == {"params/new", "params/b"}
    for one in ({"on_missing": "keep"}, {"on_unexpected": "ignore"}):
        with pytest.raises(TargetError):
            ok.restore(path, target=target, **one)
    state = ok.restore(path, target=target, on_missing="keep", on_unexpected="ignore")
    assert (float(state["params"]["w"].sum()), float(state["params"]["new"][0]), state["step"]) == (2.0, 5.0, 4)
    target["params"]["new"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(TargetError, match="params/new: abstract"):
        ok.restore(path, target=target, on_missing="keep", on_unexpected="ignore")


def test_A14_params_within_params_suggest_the_prefix(tmp_path):
    path = save(tmp_path / "c", {"params": {"params": {"decoder": {"w": jnp.ones(2)}}}})
    target = {"params": {"decoder": {"w": jnp.zeros(2)}}}
    with pytest.raises(TargetError, match="0 of 1 target leaves matched; did you mean prefix params/params") as error:
        ok.restore(path, target=target)
    assert "ok.rename({'params/params/**': 'params/**'})" in str(error.value)
    moved = ok.restore(path, ok.rename({"params/params/**": "params/**"}), target=target)
    assert moved["params"]["decoder"]["w"][0] == 1


def test_a_first_level_key_that_the_target_lacks_is_not_read(tmp_path):
    state = ok.restore(save(tmp_path / "c", f1_tree()), target={"params": f1_tree()["params"]})
    assert list(state) == ["params"]


def test_an_empty_optimizer_in_the_target_does_not_swallow_a_saved_one(tmp_path):
    with pytest.raises(TargetError, match="unexpected"):
        ok.restore(save(tmp_path / "c", f1_tree()), target={"params": f1_tree()["params"], "opt_state": ()})


def test_A16_int_keys(tmp_path):
    tree = {"layers": {i: jnp.full(1, i) for i in (0, 1, 10, 2)}}
    path = save(tmp_path / "c", tree)
    assert list(ok.restore(path)["layers"]) == ["0", "1", "2", "10"]
    restored = ok.restore(path, target=tree)
    assert {key: int(value[0]) for key, value in restored["layers"].items()} == {0: 0, 1: 1, 2: 2, 10: 10}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def test_A17_nnx_state_strips_its_value_level_on_request(tmp_path):
    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    raw = save(tmp_path / "raw", state)
    pure = save(tmp_path / "pure", nnx.to_pure_dict(state))
    assert "value" in ok.restore(raw)["first"]["kernel"]
    chex.assert_trees_all_equal(ok.restore(raw, strip_value="auto"), ok.restore(pure))
    chex.assert_trees_all_equal(ok.restore_params(raw), ok.restore(pure))


def test_A17_a_param_called_value_beside_others_stays(tmp_path):
    tree = {"head": {"value": jnp.ones(1), "scale": jnp.ones(1)}, "body": {"kernel": {"value": jnp.ones(2)}}}
    restored = ok.restore(save(tmp_path / "c", tree), strip_value="auto")
    assert jax.tree.map(jnp.shape, restored) == {"head": {"value": (1,), "scale": (1,)}, "body": {"kernel": (2,)}}


def test_A17_only_linen_boxes_strip(tmp_path):
    tree = {"d": {"kernel": nn.Partitioned(jnp.ones((2, 3)), names=(None, "model")), "bias": jnp.ones(3)}}
    path = save(tmp_path / "c", tree)
    assert jax.tree.map(jnp.shape, ok.restore_params(path)) == {"d": {"kernel": (2, 3), "bias": (3,)}}
    assert isinstance(ok.restore(path, target=tree)["d"]["kernel"], nn.Partitioned)


@pytest.mark.parametrize("saved", ["raw", "pure"])
def test_an_nnx_model_is_restored_from_either_form(tmp_path, saved):
    model = Model(nnx.Rngs(1))
    state = nnx.state(model)
    path = save(tmp_path / "c", state if saved == "raw" else nnx.to_pure_dict(state))
    restored = ok.restore(path, target=Model(nnx.Rngs(2)))
    assert isinstance(restored, Model)
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(restored, nnx.Param)), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(2)))
    assert isinstance(ok.restore(path, target=nnx.state(abstract)), nnx.State)


def test_train_state_keeps_apply_fn_and_tx(tmp_path):
    tx = optax.adamw(1e-3)
    state = TrainState.create(apply_fn=print, params={"w": jnp.ones(3)}, tx=tx)
    path = save(tmp_path / "c", state.replace(step=5))
    restored = ok.restore(path, target=jax.eval_shape(lambda: state))
    assert (restored.apply_fn, restored.tx, int(restored.step)) == (print, tx, 5)


def test_frozen_dict_target(tmp_path):
    path = save(tmp_path / "c", {"params": {"w": jnp.ones(3)}})
    assert isinstance(ok.restore_params(path, target=FrozenDict({"w": jnp.zeros(3)})), FrozenDict)


def test_A18_prng_keys_come_back_as_saved(tmp_path):
    tree = {"a": jax.random.key(42), "b": jax.random.key(7, impl="rbg"), "raw": jax.random.PRNGKey(1)}
    path = save(tmp_path / "c", tree)
    for restored in (ok.restore(path), ok.restore(path, as_numpy=True), ok.restore(path, target=tree)):
        for name in ("a", "b"):
            assert restored[name].dtype == tree[name].dtype
            np.testing.assert_array_equal(jax.random.key_data(restored[name]), jax.random.key_data(tree[name]))
        np.testing.assert_array_equal(restored["raw"], tree["raw"])
    assert [spec.dtype_name for spec in ok.open(path).specs.values()] == ["key<fry>", "key<rbg>", "uint32"]


def test_A18_lost_key_types_are_told(tmp_path):
    path = save(tmp_path / "c", {"a": jax.random.key(42)})
    shutil.rmtree(path / "array_metadatas")
    ckpt = ok.open(path)
    with pytest.warns(ok.CheckpointWarning, match="a: uint32 arrays here may be typed PRNG keys"):
        specs = ckpt.specs
    assert specs["a"].dtype_name == "uint32"
    assert any("PRNG keys" in note for note in ckpt.notes)


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])
def test_A19_params_only_restore_never_opens_the_moments(tmp_path, use_ocdbt):
    kernel = jax.random.normal(jax.random.key(0), (256, 256))
    path = save(tmp_path / "c", f1_tree(kernel), use_ocdbt=use_ocdbt)
    if not use_ocdbt:
        for chunks in path.glob("opt_state*u.dense*"):
            for chunk in chunks.glob("[0-9]*"):
                chunk.unlink()
    before = _bytes_read()
    params = ok.restore_params(path)
    stored = sum(spec.stored_bytes for name, spec in ok.open(path).specs.items() if name.startswith("params/"))
    assert _bytes_read() - before <= stored * 1.02 + 65536
    np.testing.assert_array_equal(params["dense"]["kernel"], kernel)


def _bytes_read() -> int:
    """What this process has read from files, by whatever library."""
    with open("/proc/self/io") as counters:
        return int(counters.readline().split()[1])


def test_as_numpy_gives_host_arrays_of_any_width(tmp_path):
    tree = {"wide": np.arange(3, dtype=np.int64), "b": jnp.ones(2, jnp.bfloat16)}
    restored = ok.restore(save(tmp_path / "c", tree), as_numpy=True)
    assert [type(x) for x in jax.tree.leaves(restored)] == [np.ndarray, np.ndarray]
    assert restored["wide"].dtype == np.int64


def test_a_64_bit_jax_leaf_is_refused_while_x64_is_off(tmp_path):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        path = save(tmp_path / "c", {"wide": jnp.arange(3, dtype=jnp.int64)})
    with pytest.raises(TargetError, match="64-bit") as error:
        ok.restore(path)
    assert "as_numpy=True" in str(error.value)
    assert ok.restore(path, ok.cast("int32", "wide"))["wide"].dtype == jnp.int32


def test_dtype_casts_floating_point_arrays_and_nothing_else(tmp_path):
    path = save(tmp_path / "c", {"w": jnp.ones(2), "ids": jnp.arange(2), "lr": 0.1})
    restored = ok.restore(path, dtype=jnp.bfloat16)
    assert (restored["w"].dtype, restored["ids"].dtype, restored["lr"]) == (jnp.bfloat16, jnp.int32, 0.1)
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    assert ok.restore(path, dtype="bfloat16", target=target)["w"].dtype == jnp.bfloat16
    with pytest.raises(TargetError, match="dtype"):
        ok.restore(path, dtype="float16", target=target)


def test_shape_mismatch_is_an_error_unless_kept(tmp_path):
    path = save(tmp_path / "c", {"w": jnp.ones((2, 3)), "b": jnp.ones(1)})
    target = {"w": jnp.full((3, 2), 7.0), "b": jnp.zeros(1)}
    with pytest.raises(TargetError, match=r"w: shape: found float32\[2, 3\], target wants float32\[3, 2\]"):
        ok.restore(path, target=target)
    restored = ok.restore(path, target=target, on_shape_mismatch="keep")
    assert (float(restored["w"][0, 0]), float(restored["b"][0])) == (7.0, 1.0)


def test_options_that_do_not_exist_are_refused(tmp_path):
    path = save(tmp_path / "c", {"w": jnp.ones(1)})
    with pytest.raises(Exception, match="on_missing"):
        ok.restore(path, target={"w": jnp.ones(1)}, on_missing="zeros")


def test_shardings_that_do_not_fit_are_listed_before_anything_is_read(tmp_path):
    path = save(tmp_path / "c", {"odd": jnp.ones((5, 2)), "even": jnp.ones((8, 2)), "short": jnp.ones(8)})
    with pytest.raises(TargetError, match="shardings that do not fit") as error:
        ok.restore(path, sharding=NamedSharding(mesh(8), P("data", None)))
    assert dict(error.value.leaves) == {
        "odd": "float32[5, 2]: axis 0 does not divide into 8",
        "short": "float32[8]: P('data', None) has more axes",
    }


@pytest.mark.parametrize("chosen", [P("data"), None, "saved"], ids=str)
def test_a_function_that_gives_no_sharding_is_refused_with_the_leaf(tmp_path, chosen):
    path = save(tmp_path / "c", {"w": jnp.ones(8)})
    with pytest.raises(TargetError, match=r"which is no jax.sharding.Sharding\n  w: float32\[8\]"):
        ok.restore(path, sharding=lambda path, spec: chosen)


def test_an_abstract_mesh_is_refused(tmp_path):
    path = save(tmp_path / "c", {"w": jnp.ones(8)})
    sharding = NamedSharding(jax.sharding.AbstractMesh((8,), ("data",)), P("data"))
    with pytest.raises(TargetError, match="its mesh is abstract"):
        ok.restore(path, target={"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sharding": SingleDeviceSharding(jax.devices()[0]), "as_numpy": True}, "as_numpy=True puts arrays on no"),
        ({"sharding": SingleDeviceSharding(jax.devices()[0]), "target": {"w": jnp.ones(1)}}, "have shardings"),
        ({"sharding": {"w": None}}, "neither a jax.sharding.Sharding nor a function"),
        ({"on_missing": "keep"}, "there is none"),
        ({"strip_value": "always"}, "strip_value"),
    ],
    ids=["host", "target", "tree", "no target", "strip"],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, options, says):
    path = save(tmp_path / "c", {"w": jnp.ones(1)})
    with pytest.raises(Exception, match=says):
        ok.restore(path, **options)


def test_plans_are_made_on_anything_that_has_leaves(tmp_path):
    tree = {"a": {"w": np.ones((2, 3), np.float32)}}
    path = save(tmp_path / "run" / "1" / "default", tree)
    expected = ok.plan(ok.open(path), ok.transpose("a/w"))
    assert ok.plan(path, ok.transpose("a/w")) == expected
    assert ok.plan(ok.open(path).specs, ok.transpose("a/w")) == expected
    assert list(ok.plan(tree, ok.transpose("a/w")).outputs) == ["a/w"]
    with pytest.raises(CheckpointError):
        ok.plan(tmp_path / "nothing")
