"""place_rows: any rows to any places, against numpy's own indexing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbaxkit as ok


@given(st.data(), st.integers(0, 1), st.integers(1, 6), st.integers(1, 9))
def test_rows_go_where_numpy_puts_them(data, axis: int, count: int, size: int):
    count = min(count, size)
    rows = data.draw(st.permutations(range(size)))[:count]
    rng = np.random.default_rng(0)
    old, new = (np.moveaxis(rng.random((n, 3), np.float32), 0, axis) for n in (count, size))
    expected = new.copy()
    expected[(slice(None),) * axis + (rows,)] = old
    made = ok.apply({"w": old}, ok.place_rows("w", rows, into=new, axis=axis))["w"]
    np.testing.assert_array_equal(made, expected)


def test_a_mapping_leaves_rows_out():
    old = np.arange(8, dtype=np.float32).reshape(4, 2)
    made = ok.apply({"w": old}, ok.place_rows("w", {3: 0, 1: 2}, into=np.zeros((3, 2), np.float32)))["w"]
    np.testing.assert_array_equal(made, [[6, 7], [0, 0], [2, 3]])


@pytest.mark.parametrize(
    ("rows", "into", "says"),
    [
        ([0, 0], np.zeros((4, 2), np.float32), "two rows for one place: 0"),
        ([], np.zeros((4, 2), np.float32), "needs a row"),
        ([0.5], np.zeros((4, 2), np.float32), "not an integer"),
        ([-1], np.zeros((4, 2), np.float32), "less than 0"),
        ([0, 9], np.zeros((4, 2), np.float32), "place 9 of 4"),
        ({7: 0}, np.zeros((4, 2), np.float32), "row 7 of 2"),
        ([0, 1], np.zeros((4, 3), np.float32), "does not fit into"),
        ([0, 1], np.zeros((4, 2), np.float16), "cast one of them first"),
        ([0, 1], 3.0, "is no array"),
    ],
)
def test_rows_that_have_no_place_are_refused(rows, into, says):
    with pytest.raises(ok.TransformError, match=says):
        ok.plan({"w": np.ones((2, 2), np.float32)}, ok.place_rows("w", rows, into=into))


def test_moments_that_do_not_start_at_zero_are_refused():
    params = {"w": np.ones((2, 2), np.float32)}
    state = [{"sum_of_squares": {"w": np.full((2, 2), 0.1, np.float32)}}]
    rule = ok.place_rows("params/w", [0, 3], into=np.zeros((4, 2), np.float32))
    with pytest.raises(ok.TransformError, match="joined with a constant"):
        ok.plan({"params": params, "opt_state": state}, rule)
