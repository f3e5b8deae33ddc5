"""Comparing checkpoints: what differs is named, values only when asked, bit for bit or to a tolerance."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases import save
from hypothesis import given
from hypothesis import strategies as st

import orbaxkit as ok

TREE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.asarray([1.0, np.nan, -0.0], jnp.bfloat16),
    "step": 3,
    "name": "a",
    "none": None,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("diff") / "a", TREE)


def test_equal_checkpoints_of_other_storage_do_not_differ(saved: Path, tmp_path: Path):
    other = save(tmp_path / "b", TREE, use_zarr3=True, use_ocdbt=False)
    found = ok.diff(saved, other, values=True)
    assert not found
    assert str(found).split("\n")[2:] == [
        "the same structure, shapes and dtypes: 5 leaves",
        "the same values, bit for bit: 4 leaves",
    ]


def test_without_values_the_text_says_that_they_were_not_compared(saved: Path):
    found = ok.diff(saved, {**TREE, "step": 4})
    assert not found
    assert found.values is None
    assert str(found).endswith("leaves\nvalues were not compared (values=True, --values)")


def test_structure_shapes_and_dtypes_are_told_apart(saved: Path):
    other = {
        "w": np.zeros((3, 2), np.float32),
        "half": np.zeros(3, np.float32),
        "step": 3,
        "name": "a",
        "new": np.ones(1),
    }
    found = ok.diff(saved, other, values=True)
    assert found
    assert str(found).split("\n")[2:] == [
        "only in a: 1 leaf",
        "  none  None",
        "only in b: 1 leaf",
        "  new  float64[1]",
        "shape differs: 1 leaf",
        "  w  float32[2, 3] in a  float32[3, 2] in b",
        "dtype differs: 1 leaf",
        "  half  bfloat16[3] in a  float32[3] in b",
        "the same values, bit for bit: 2 leaves",
    ]


@pytest.mark.parametrize(
    ("leaf", "value", "line"),
    [
        ("w", TREE["w"] + np.float32([[0, 0, 0], [0, 0.5, 0]]), "w  1 of 6 elements, max abs 0.5, max rel 0.111"),
        ("half", np.asarray([1.0, 2.0, -0.0], jnp.bfloat16), "half  1 of 3 elements, max abs inf, max rel inf"),
        ("half", np.asarray([1.0, np.nan, 0.0], jnp.bfloat16), "half  1 of 3 elements, max abs 0, max rel 0"),
        ("step", 5, "step  3 in a, 5 in b"),
        ("name", "b", "name  'a' in a, 'b' in b"),
    ],
    ids=["number", "NaN", "the sign of zero", "scalar", "string"],
)
def test_values_that_differ_are_measured(saved: Path, leaf: str, value: Any, line: str):
    found = ok.diff(saved, {**TREE, leaf: value}, values=True)
    assert found
    assert [each.name for each in found.values or ()] == [leaf]
    assert f"values differ: 1 leaf\n  {line}" in str(found)


def test_the_payload_of_a_nan_is_a_difference_of_bits(saved: Path):
    half = TREE["half"].copy()
    half.view("u2")[1] ^= 1
    found = ok.diff(saved, {**TREE, "half": half}, values=True)
    assert [(each.differing, each.max_abs) for each in found.values or ()] == [(1, 0.0)]


@pytest.mark.parametrize(
    ("rtol", "atol", "differs"), [(0, 0, True), (0, 1e-3, True), (0, 1e-2, False), (1e-4, 0, True), (1e-2, 0, False)]
)
def test_tolerances_are_those_of_numpy(saved: Path, rtol: float, atol: float, differs: bool):
    other = TREE["w"] + np.float32(5e-3) * (TREE["w"] > 0)
    found = ok.diff({"w": TREE["w"]}, {"w": other}, values=True, rtol=float(rtol), atol=float(atol))
    assert bool(found) == differs == (not np.allclose(TREE["w"], other, rtol=rtol, atol=atol))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.lists(st.floats(width=32), min_size=8, max_size=8),
    st.sampled_from([(0.0, 0.0), (1e-3, 0.0), (0.0, 1.0)]),
)
def test_what_differs_is_what_numpy_says(left: list[float], right: list[float], tolerances: tuple[float, float]):
    a, b = np.asarray(left, np.float32), np.asarray(right[: len(left)], np.float32)
    rtol, atol = tolerances
    same = a.view("u4") == b.view("u4")
    if rtol or atol:
        same |= np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    found = ok.diff({"x": a}, {"x": b}, values=True, rtol=rtol, atol=atol)
    assert sum(each.differing for each in found.values or ()) == int((~same).sum())


def test_integers_and_complex_numbers_are_compared(tmp_path: Path):
    a = {"i": np.asarray([1, 2**53], np.int64), "c": np.asarray([1 + 2j, 3]), "b": np.asarray([True, False])}
    b = {"i": np.asarray([1, 2**53 + 1], np.int64), "c": np.asarray([1 + 3j, 3]), "b": np.asarray([True, True])}
    found = ok.diff(save(tmp_path / "a", a), b, values=True)
    assert {each.name: each.differing for each in found.values or ()} == {"i": 1, "c": 1, "b": 1}


def test_a_transform_makes_the_first_comparable_with_the_second(saved: Path):
    other = {"model": {"w": TREE["w"].T}, "half": TREE["half"]}
    rules = (ok.select("w", "half"), ok.transpose("w"), ok.rename({"w": "model/w"}))
    assert not ok.diff(saved, other, *rules, values=True)
    assert ok.diff(saved, other, values=True).only_in_b[0][0] == "model/w"


def test_large_leaves_are_compared_in_parts(tmp_path: Path):
    w = np.random.default_rng(0).standard_normal((9_000, 2_000), np.float32)
    other = w.copy()
    other[8_999, 1_999] += 1
    other[0, 0] += 1
    found = ok.diff(save(tmp_path / "a", {"w": w}), save(tmp_path / "b", {"w": other}, use_zarr3=True), values=True)
    assert [(each.differing, each.size) for each in found.values or ()] == [(2, 18_000_000)]


def test_json_holds_every_leaf(saved: Path):
    data = ok.diff(saved, {**TREE, "step": 4, "w": TREE["w"] + np.float32("inf")}, values=True).to_json()
    assert data["is_equal"] is False
    assert [each["path"] for each in data["values"]] == ["step", "w"]
    assert data["values"][1]["max_abs"] == "inf"


def test_many_differences_are_cut_short_in_the_text_alone():
    found = ok.diff({f"a{i}": np.ones(1) for i in range(50)}, {"b": np.ones(1)})
    assert len(found.only_in_a) == 50
    assert "  and 30 more" in str(found)
