"""`sharding="saved"`: each leaf as it was saved, on the mesh that is present; who does not fit is told why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import save
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbaxkit as ok


def mesh(*sizes: int, names: str = "xy", count: int = 8) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(names))


def saved(path, on: Mesh, tree: dict):
    """A tree of `name: (shape, spec)`; None for the spec is one device."""
    return save(
        path,
        {
            name: jnp.zeros(shape) if spec is None else jax.device_put(jnp.zeros(shape), NamedSharding(on, spec))
            for name, (shape, spec) in tree.items()
        },
    )


def specs_of(tree) -> dict:
    return {name: getattr(leaf.sharding, "spec", None) for name, leaf in tree.items()}


def test_each_leaf_lies_as_it_was_saved(tmp_path):
    tree = {"w": ((8, 4), P("x", "y")), "v": ((16,), P(("y", "x"))), "whole": ((3,), P()), "one": ((3,), None)}
    path = saved(tmp_path / "c", mesh(4, 2), tree)
    made = ok.restore(path, sharding="saved")
    assert specs_of(made) == {name: P() if spec is None else spec for name, (_, spec) in tree.items()}
    assert all(leaf.sharding.mesh == mesh(4, 2) for leaf in made.values())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ok.unstack("k", into="k_{i}", axis=1), P("x", "y")),
        (ok.stack("k{i}", into="k", axis=1), P("x", None, None, "y")),
        (ok.transpose("k", (2, 0, 1)), P("y", "x", None)),
        (ok.reshape("k", (24, 4)), P("x", "y")),
        (ok.reshape("k", (8, 12)), P("x", None)),
        (ok.affine("k", scale=2.0), P("x", None, "y")),
        (ok.cast("bfloat16"), P("x", None, "y")),
        (ok.split("k", into=["a", "b"], axis=0), P("x", None, "y")),
    ],
    ids=["unstack", "stack", "transpose", "reshape", "mixed", "affine", "cast", "split"],
)
def test_axes_keep_their_names_through_transforms(tmp_path, rule, expected):
    names = ["k0", "k1"] if isinstance(rule, type(ok.stack("a{i}", into="b"))) else ["k"]
    path = saved(tmp_path / "c", mesh(4, 2), dict.fromkeys(names, ((8, 3, 4), P("x", None, "y"))))
    for leaf in ok.restore(path, rule, sharding="saved").values():
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh(4, 2), expected), leaf.ndim)


def test_the_mesh_that_is_set_is_the_one(tmp_path):
    path = saved(tmp_path / "c", mesh(4, 2), {"w": ((8, 4), P("x", "y")), "one": ((3,), None)})
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("y", "x", "z"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(other):
        made = ok.restore(path, sharding="saved")
    assert {name: leaf.sharding for name, leaf in made.items()} == {
        "w": NamedSharding(other, P("x", "y")),
        "one": NamedSharding(other, P()),
    }


def test_without_any_mesh_the_default_device(tmp_path):
    path = save(tmp_path / "c", {"w": jnp.ones(3), "host": np.ones(3)})
    made = ok.restore(path, sharding="saved")
    assert made["w"].sharding == SingleDeviceSharding(jax.devices()[0])
    assert isinstance(made["host"], np.ndarray)


def test_every_leaf_that_does_not_fit_is_told_why(tmp_path):
    tree = {"fits": ((8,), P("x")), "odd": ((6,), P("x")), "other": ((8,), P("y")), "one": ((3,), None)}
    path = saved(tmp_path / "c", mesh(2, 2, count=4), tree)
    with jax.set_mesh(mesh(8, names="x")), pytest.raises(ok.TargetError, match="do not fit the devices here") as error:
        ok.restore(path, sharding="saved")
    told = dict(error.value.leaves)
    assert told.keys() == {"odd", "other"}
    assert told["odd"] == "float32[6] saved as P(x) on (x=2, y=2): axis 0 does not divide into 8"
    assert "y" in told["other"].partition(": ")[2]
    assert "jax.make_mesh((…), ('x', 'y'))" in str(error.value)


def test_another_number_of_devices_needs_a_mesh(tmp_path):
    path = saved(tmp_path / "c", mesh(2, 2, count=4), {"w": ((8, 4), P("x", "y"))})
    with pytest.raises(ok.TargetError, match=r"saved as P\(x, y\) on \(x=2, y=2\): on 4 devices, and here are 8"):
        ok.restore_params(path, sharding="saved")
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        assert ok.restore_params(path, sharding="saved")["w"].sharding.spec == P("x", "y")
