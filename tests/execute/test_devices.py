"""The device executor against numpy's evaluation: the same bits on the host and on devices, each leaf read once."""

import gc
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from planning.random_plans import NARROW, data_for, is_same, plans
from planning.random_plans import run as run_with_numpy

import orbaxkit as ok
from orbaxkit.execute import devices
from orbaxkit.execute.memory import MemorySource
from orbaxkit.execute.placing import host_bytes
from orbaxkit.formats import Done
from orbaxkit.planning import Plan
from orbaxkit.specs import LeafSpec


@dataclass(frozen=True)
class Words(MemorySource):
    """Random data for a plan's source, keys as their words; counts the elements that are read."""

    elements: dict[str, int] = field(default_factory=dict)

    def read(self, name, index, out):
        out[...] = self.values[name][index]
        self.elements[name] = self.elements.get(name, 0) + out.size
        return Done()


def source_of(plan: Plan, seed: int) -> Words:
    data = data_for(plan.source, seed)
    plain = {
        n: "text" if s.kind == "string" else data[n][()]
        for n, s in plan.source.items()
        if s.kind in ("scalar", "string")
    }
    return Words(plan.source, data | plain)


def words_of(value):
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


@pytest.mark.parametrize("where", ["host", "device", "replicated"])
@settings(max_examples=20)
@given(plan=plans(tuple(NARROW.split())), seed=st.integers(0, 2**32 - 1))
def test_any_plan_gives_what_numpy_gives(where: str, plan: Plan, seed: int):
    sharding = {
        "host": None,
        "device": SingleDeviceSharding(jax.devices()[1]),
        "replicated": NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P()),
    }[where]
    arrays = [n for n, spec in plan.specs.items() if spec.kind in ("array", "numpy", "key")]
    source = source_of(plan, seed)
    try:
        expected = run_with_numpy(plan, data_for(plan.source, seed))
        made = devices.run(plan, source, dict.fromkeys(arrays, sharding))
    except ok.TransformError:  # values that do not fit an integer dtype
        return
    for name in arrays:
        assert is_same(plan)(words_of(made[name]), expected[name]), name
        assert sharding is None or made[name].sharding.is_equivalent_to(sharding, made[name].ndim)
    for name, count in source.elements.items():
        assert count <= np.prod(plan.source[name].data_shape), name


def test_what_is_transposed_and_cut_is_read_once_on_the_host_too():
    w = np.arange(27 * 4 * 6, dtype=np.float32).reshape(27, 4, 6)
    specs = ok.plan({"layers": {"w": w}}).source
    plan = ok.plan(specs, ok.transpose("layers/w", (0, 2, 1)), ok.unstack("layers", into="layers_{i}", axis=0))
    source = Words(specs, {"layers/w": w})
    made = devices.run(plan, source, dict.fromkeys(plan.outputs))
    np.testing.assert_array_equal(made["layers_26/w"], w[26].T)
    assert source.elements == {"layers/w": w.size}


@pytest.mark.parametrize("as_numpy", [True, False])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ok.transpose("k"), lambda keys: keys.T),
        (ok.reshape("k", [6]), lambda keys: keys.reshape(6)),
        (ok.unstack("k", into="k_{i}", axis=0), lambda keys: keys[0]),
    ],
    ids=["transpose", "reshape", "unstack"],
)
def test_keys_stay_keys(tmp_path, as_numpy, rule, expected):
    keys = jax.random.split(jax.random.key(3), (2, 3))
    ok.convert({"k": keys}, tmp_path / "c")
    (made, *_) = jax.tree.leaves(ok.restore(tmp_path / "c", rule, as_numpy=as_numpy))
    assert jnp.issubdtype(made.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(jax.random.key_data(made), jax.random.key_data(expected(keys)))


def test_a_replicated_key_stays_a_key():
    keys = jnp.stack([jax.random.key(1)] * 2)
    made = ok.apply({"k": keys}, ok.unreplicate("k"))["k"]
    assert made.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(made), jax.random.key_data(keys[0]))


def test_arrays_that_filled_a_leaf_are_not_kept():
    value = jnp.arange(12.0).reshape(3, 4)
    made = ok.apply({"w": jnp.zeros((3, 4))}, ok.fill("w", value), ok.transpose("w"))
    np.testing.assert_array_equal(made["w"], np.arange(12.0).reshape(3, 4).T)
    held = weakref.ref(value)
    del value, made
    gc.collect()
    assert held() is None


def test_filled_numbers_and_strings_come_back_as_what_they_are(tmp_path):
    ok.convert({"step": 3, "name": "a"}, tmp_path / "c")
    made = ok.restore(tmp_path / "c", ok.fill("step", 4.0), ok.fill("name", "b"), ok.fill("new", "c"))
    assert made == {"step": 4, "name": "b", "new": "c"}
    assert type(made["step"]) is int


@pytest.mark.parametrize(
    ("spec", "expected"), [(P(), 512), (P("x"), 512), (None, 512)], ids=["replicated", "sharded", "host"]
)
def test_memory_is_counted_once_for_what_this_host_holds(spec, expected):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = None if spec is None else NamedSharding(mesh, spec)
    assert host_bytes(LeafSpec((16, 8), np.dtype("float32")), sharding) == expected


def test_inside_the_users_own_jit_and_vmap():
    tree = {"layers": {"w": jnp.arange(24.0).reshape(2, 3, 4)}}
    rules = ok.unstack("layers", into="layers_{i}", axis=0), ok.transpose("layers_*/w")
    made = jax.jit(lambda tree: ok.apply(tree, *rules))(tree)
    np.testing.assert_array_equal(made["layers_1"]["w"], tree["layers"]["w"][1].T)
    rows = jax.vmap(lambda w: ok.apply({"w": w}, ok.transpose("w"))["w"])(tree["layers"]["w"])
    np.testing.assert_array_equal(rows, tree["layers"]["w"].transpose(0, 2, 1))
