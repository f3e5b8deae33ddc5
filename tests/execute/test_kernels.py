"""Kernels: the bits that numpy gives, few compilations, any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import save
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbaxkit as ok
from orbaxkit.execute.pullback import pull_back
from orbaxkit.planning import expressions as ex
from orbaxkit.specs import LeafSpec

W = np.arange(4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16)
TRANSFORMS = {
    "unstack": (ok.unstack("layers", into="layer_{i}", axis=0),),
    "unstack inner": (ok.unstack("layers", into="layer_{i}", axis=1),),
    "transpose": (ok.transpose("layers/w"),),
    "transpose then unstack": (
        ok.transpose("layers/w", axes=(1, 0, 2)),
        ok.unstack("layers", into="layer_{i}", axis=0),
    ),
    "reshape": (ok.reshape("layers/w", (32, 16)),),
    "affine": (ok.affine("layers/w", scale=2.0, shift=1.0),),
    "split": (ok.split("layers/w", into=["a", "b"], axis=2),),
    "restack": (ok.unstack("layers", into="layer_{i}", axis=0), ok.stack("layer_{i}", into="other", axis=2)),
    "cast": (ok.transpose("layers/w"), ok.cast("bfloat16")),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("kernels") / "c", {"layers": {"w": jnp.asarray(W)}})


def mesh(kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(kind, kind))


def sharding_for(mesh: Mesh):
    """Shard the first axes that divide, the layer axis too."""

    def choose(name, spec):
        names = iter(mesh.axis_names)
        parts = [next(names, None) if size % 4 == 0 else None for size in spec.shape]
        return NamedSharding(mesh, P(*parts))

    return choose


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_any_mesh_gives_the_bits_of_numpy(path, transforms, kind):
    want = ok.restore(path, *transforms, as_numpy=True)
    choose = sharding_for(mesh(kind))
    got = ok.restore(path, *transforms, sharding=choose)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding == choose("", b)
        assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P(), P("x", None, "y"), P(None, "y", "x")], ids=str)
def test_arrays_in_memory_on_any_mesh(transforms, kind, spec):
    x = jax.device_put(W, NamedSharding(mesh(kind), spec))
    got = ok.apply({"layers": {"w": x}}, *transforms)
    want = ok.apply({"layers": {"w": W}}, *transforms)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.mesh == x.sharding.mesh
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_pinned_host_memory_gets_what_was_computed_on_devices(path, transforms, where):
    sharding = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    if where == "mesh":
        sharding = NamedSharding(mesh(AxisType.Explicit), P("x"), memory_kind="pinned_host")
    want = ok.restore(path, *transforms, as_numpy=True)
    got = ok.restore(path, *transforms, sharding=sharding)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding == sharding
        assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def test_A44_one_compilation_for_each_shape():
    shapes = [(96, 8, 8 + k % 4) for k in range(12)]
    tree = {"layers": {f"w{k}": jnp.full(shape, k, jnp.float32) for k, shape in enumerate(shapes)}}
    with jax.log_compiles(), _count_compilations() as compiled:
        out = ok.apply(tree, ok.unstack("layers", into="layer_{i}", axis=0))
    assert len(jax.tree.leaves(out)) == 1152
    assert len(compiled) <= len(set(shapes))


class _count_compilations:
    """The names of what jax compiles meanwhile, from its own log."""

    def __enter__(self) -> list[str]:
        import logging

        self.names: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self._note(record.getMessage())  # type: ignore[method-assign]
        self.logger = logging.getLogger("jax")
        self.logger.addHandler(self.handler)
        return self.names

    def _note(self, message: str) -> None:
        if message.startswith("Finished XLA compilation"):
            self.names.append(message)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)


def test_what_was_read_for_kernels_is_freed(path):
    before = len(jax.live_arrays())
    out = ok.restore(path, ok.transpose("layers/w"))
    assert len(jax.live_arrays()) == before + 1
    assert out["layers"]["w"].shape == (16, 8, 4)


def test_inside_the_users_own_jit():
    x = jnp.asarray(W)
    plan = ok.plan(ok.open_tree({"w": x}) if hasattr(ok, "open_tree") else _specs({"w": x}), ok.transpose("w"))
    out = jax.jit(lambda leaves: plan.as_function()(leaves)["w"] * 2)({"w": x})
    np.testing.assert_array_equal(out, W.T * 2)


def _specs(tree):
    from orbaxkit.trees import flatten

    return flatten(tree).specs


@pytest.mark.parametrize(
    ("source", "shape", "spec", "expected"),
    [
        ((8, 4, 16), (8, 64), P(None, "y"), P(None, "y", None)),  # heads joined
        ((8, 64), (8, 4, 16), P(None, "y"), P(None, "y")),  # and parted
        ((8, 4, 16), (8, 64), P("x", "y"), P("x", "y", None)),
        ((3, 8, 4), (24, 4), P("y"), P(None, None, None)),  # three heads are no four pieces
        ((4, 6), (2, 2, 6), P(None, "x"), P(None, None)),  # not the first of the axes that mix
        ((1, 8), (8, 1), P("x"), P(None, "x")),
        ((0, 8), (8, 0), P("x"), P(None, None)),
        ((4, 6), (24,), P(("x", "y")), P(None, None)),
        ((8, 6), (48,), P(("x", "y")), P(("x", "y"), None)),
    ],
)
def test_a_reshape_reads_the_pieces_that_it_keeps(source, shape, spec, expected):
    node = ex.reshape(ex.read("w", LeafSpec(source, np.dtype("float32"))), shape)
    (found,) = pull_back(node, NamedSharding(mesh(AxisType.Auto), spec))
    assert found.is_equivalent_to(NamedSharding(mesh(AxisType.Auto), expected), len(source))
