"""Haiku pickles: what plain pickle would give, without running anything; hostile and malformed ones are refused."""

import collections
import contextlib
import hashlib
import json
import os
import pickle
import pickletools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok

WORLD = Path(__file__).parent.parent / "worlds/perceiver"
FLAT = WORLD / "language_tiny.flatmapping.pickle"


def saved(folder: Path, tree, protocol: int = 4) -> Path:
    path = folder / "p.pickle"
    path.write_bytes(pickle.dumps(tree, protocol=protocol))
    return path


def test_every_array_of_a_flatmapping_is_the_one_that_haiku_saved():
    tree = ok.restore(FLAT, as_numpy=True)
    expected = json.loads((WORLD / "haiku.json").read_text())
    found = {f"{module}/{name}": array for module, params in tree.items() for name, array in params.items()}
    assert set(found) == set(expected)
    for name, array in found.items():
        assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == expected[name]["sha256"]
    assert ok.open(FLAT).specs['"perceiver_encoder/~/trainable_position_encoding"/pos_embs'].shape == (6, 32)


TREE = {
    "mlp/~/linear_0": {"w": np.arange(6, dtype=">f4").reshape(2, 3).T, "b": np.float32(3)},
    "other": collections.OrderedDict(w=np.ones((0, 2)), flags=np.array([True, False]), step=7, name="x", none=None),
    "list": [np.arange(3, dtype=np.int8), (np.complex64(1j),)],
}


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(tmp_path: Path, protocol: int):
    tree = ok.restore(saved(tmp_path, TREE, protocol), as_numpy=True)
    np.testing.assert_array_equal(tree["mlp/~/linear_0"]["w"], TREE["mlp/~/linear_0"]["w"])
    assert tree["mlp/~/linear_0"]["w"].dtype == np.float32
    assert tree["mlp/~/linear_0"]["b"] == 3
    assert tree["other"]["w"].shape == (0, 2)
    assert (tree["other"]["step"], tree["other"]["name"], tree["other"]["none"]) == (7, "x", None)
    np.testing.assert_array_equal(tree["list"][0], TREE["list"][0])


def test_old_numpy_paths_and_jax_arrays(tmp_path: Path):
    data = pickle.dumps({"m": {"w": np.arange(3.0)}}, protocol=2).replace(b"numpy._core", b"numpy.core")
    (tmp_path / "old.pickle").write_bytes(data)
    np.testing.assert_array_equal(ok.restore(tmp_path / "old.pickle", as_numpy=True)["m"]["w"], np.arange(3.0))
    live = saved(tmp_path, {"m": {"w": jnp.arange(3, dtype=jnp.bfloat16)}})
    assert ok.restore(live)["m"]["w"].dtype == jnp.bfloat16


class Runs:
    """Runs a command when plain pickle loads it."""

    def __init__(self, mark: Path, how: str):
        self.mark, self.how = mark, how

    def __reduce__(self):
        code = f"open({str(self.mark)!r}, 'w').close()"
        return {"exec": (exec, (code,)), "system": (os.system, (f"touch {self.mark}",)), "eval": (eval, (code,))}[
            self.how
        ]


@pytest.mark.parametrize("how", ["exec", "system", "eval"])
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, how: str):
    mark = tmp_path / "ran"
    path = saved(tmp_path, {"m": {"w": np.ones(2), "x": Runs(mark, how)}})
    with pytest.raises(
        ok.CheckpointError, match=rf"holds (builtins|posix)\.{how}, which is code; nothing of it was run"
    ):
        ok.open(path).specs  # noqa: B018
    assert not mark.exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pickle.dumps({"m": np.array([object()])}), "which is code"),
        (pickle.dumps({"m": np.zeros(2, [("a", "f4")])}), "dtype with fields|dtype"),
        (pickle.dumps({"m": np.array(["a"])}), "dtype"),
        (pickle.dumps({"m": b"raw"}), "a bytes"),
        (pickle.dumps({"m": {1.5: 2}}), "key of type float"),
        (pickle.dumps({}), "a dict|no params|empty"),
        (pickle.dumps({"m": 1}) + b"more", "more after its end"),
        (b"cnumpy.lib.npyio\nload\n.", "numpy.lib.npyio.load"),
        (b"cnumpy\nsave\n.", "numpy.save"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0dlinalg.LinAlg\x93.", "numpy.linalg"),
        (b"Ppersistent\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged"),
        (b"", "empty"),
        (b"\x80\x04", "damaged"),
    ],
)
def test_what_is_no_params_is_refused(tmp_path: Path, data: bytes, says: str):
    (tmp_path / "p.pickle").write_bytes(data)
    with pytest.raises(ok.CheckpointError, match=says):
        print(ok.open(tmp_path / "p.pickle").specs)


def test_nesting_and_sharing_do_not_explode(tmp_path: Path):
    deep = 1
    for _ in range(200):  # as deep as Python 3.11 pickles
        deep = {"a": deep}
    with pytest.raises(ok.CheckpointError, match="deep"):
        ok.open(saved(tmp_path, deep)).specs  # noqa: B018
    wide = {"a": 1}
    for _ in range(60):
        wide = {"a": wide, "b": wide}
    with pytest.raises(ok.CheckpointError, match="more than 1,000,000 leaves"):
        ok.open(saved(tmp_path, wide)).specs  # noqa: B018


def test_a_small_file_takes_no_large_memory(tmp_path: Path):
    text, turned = "x" * 100_000, np.ones(100_000, ">f4")
    for shared in ([text] * 1000, [turned] * 1000):
        with pytest.raises(ok.CheckpointError, match="far larger than the file"):
            ok.open(saved(tmp_path, {"a": shared})).specs  # noqa: B018
    path = tmp_path / "memo.pickle"
    path.write_bytes(b"}Vx\nI1\nsp150000000\n.")
    with pytest.raises(ok.CheckpointError, match="a memo with a place 150,000,000"):
        ok.open(path).specs  # noqa: B018


@settings(max_examples=200)
@given(st.data())
def test_any_damage_is_one_clear_error_or_the_same_values(tmp_path_factory, data):
    raw = bytearray(pickle.dumps({"m": {"w": np.arange(4.0), "n": [1, "x"]}}, protocol=data.draw(st.integers(2, 5))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("any") / "p.pkl"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(ok.CheckpointError):
        ok.open(path).specs  # noqa: B018


def test_it_converts(tmp_path: Path):
    ok.convert(FLAT, tmp_path / "orbax")
    assert not ok.diff(FLAT, tmp_path / "orbax", values=True)
    shutil.copy(FLAT, tmp_path / "model.pkl")
    assert len(ok.open(tmp_path / "model.pkl").specs) == 89


def test_every_name_in_the_file_is_known():
    """What the fixture names, so that a change of the table cannot pass unseen."""
    names = [arg for op, arg, _ in pickletools.genops(FLAT.read_bytes()) if op.name == "SHORT_BINUNICODE"]
    assert {"FlatMapping", "_reconstruct", "ndarray", "dtype"} <= set(names)
