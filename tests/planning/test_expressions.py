"""Constructors simplify: undoing an operation gives back the very expression. They refuse what has no meaning."""

import time

import numpy as np
import pytest

from orbaxkit.errors import TransformError
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Cast, Index, Slice, Stack
from orbaxkit.specs import DTYPES, LeafSpec


def leaf(name: str, shape: tuple[int, ...], dtype: str = "float32", **facts):
    return ex.read(name, LeafSpec(shape, DTYPES[dtype], **facts))


X = leaf("x", (6, 4, 8))
Y = leaf("y", (6, 4, 8))
SIMPLER = {
    "index of stack": (ex.index(ex.stack([X, Y], 1), 1, 1), Y),
    "index of slice": (ex.index(ex.slice_(X, 0, 2, 5), 0, 1), Index(X, 0, 3)),
    "index of concat": (ex.index(ex.concat([X, Y], 0), 0, 7), Index(Y, 0, 1)),
    "stack of a run of layers": (ex.stack([ex.index(X, 0, i) for i in (2, 3)], 0), Slice(X, 0, 2, 4)),
    "stack on another axis": (ex.stack([ex.index(X, 0, i) for i in range(6)], 1), ex.transpose(X, (1, 0, 2))),
    "concat of all slices": (ex.concat([ex.slice_(X, 2, a, b) for a, b in ((0, 3), (3, 3), (3, 8))], 2), X),
    "nested concat": (ex.concat([ex.concat([X, Y], 0), X], 0), ex.concat([X, ex.concat([Y, X], 0)], 0)),
    "slice of concat": (ex.slice_(ex.concat([X, Y], 0), 0, 6, 12), Y),
    "slice across concat": (
        ex.slice_(ex.concat([X, Y], 0), 0, 5, 7),
        ex.concat([Slice(X, 0, 5, 6), Slice(Y, 0, 0, 1)], 0),
    ),
    "slice of slice": (ex.slice_(ex.slice_(X, 0, 1, 5), 0, 1, 3), Slice(X, 0, 2, 4)),
    "slice of stack": (ex.slice_(ex.stack([X, Y, X], 0), 0, 1, 3), Stack((Y, X), 0)),
    "transpose of transpose": (ex.transpose(ex.transpose(X, (2, 0, 1)), (1, 2, 0)), X),
    "reshape of reshape": (ex.reshape(ex.reshape(X, (24, 8)), (6, -1, 8)), X),
    "a layer with its axis again": (ex.reshape(ex.index(X, 1, 2), (6, 1, 8)), Slice(X, 1, 2, 3)),
    "cast to the same": (ex.cast(X, np.float32), X),
    "exact cast and back": (
        ex.cast(ex.cast(leaf("b", (2,), "bfloat16"), np.float32), DTYPES["bfloat16"]),
        leaf("b", (2,), "bfloat16"),
    ),
    "affine that does nothing": (ex.affine(X, 1, 0), X),
    "copies of one": (ex.stack([ex.unreplicate(X, 0)] * 6, 0), X),
    "layers of a constant": (
        ex.stack([ex.index(ex.fill(0.5, (3, 2)), 0, i) for i in range(3)], 0),
        ex.fill(0.5, (3, 2)),
    ),
}


@pytest.mark.parametrize(("found", "wanted"), SIMPLER.values(), ids=SIMPLER)
def test_simplifies(found, wanted):
    assert found == wanted
    assert hash(found) == hash(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_constants_are_told_apart_by_type_and_sign():
    values = [0, 0.0, -0.0, False, 0j, float("nan")]
    assert len({ex.fill(value, (2,), X.element) for value in values}) == len(values)
    assert ex.fill(float("nan"), (2,), X.element) == ex.fill(float("nan"), (2,), X.element)


@pytest.mark.parametrize("axis", range(3))
def test_a_stack_of_every_index_is_the_array(axis: int):
    assert ex.stack([ex.index(X, axis, i) for i in range(X.shape[axis])], axis) is X


@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4, 5), (0, 2, 4), (0, 1, 1)], ids=["swapped", "every other", "twice"])
def test_a_stack_of_other_orders_stays(order: tuple[int, ...]):
    assert isinstance(ex.stack([ex.index(X, 0, i) for i in order], 0), Stack)


def test_a_rounding_cast_is_not_undone():
    assert isinstance(ex.cast(ex.cast(X, DTYPES["bfloat16"]), np.float32), Cast)


REFUSED = {
    "position": (lambda: ex.index(X, 0, 6), "position 6 is not in axis 0"),
    "axis": (lambda: ex.index(X, 3, 0), "has no axis 3"),
    "slice": (lambda: ex.slice_(X, 0, 2, 7), "positions 2:7 are not in axis 0"),
    "stack shapes": (
        lambda: ex.stack([X, leaf("z", (6, 4, 7))], 0),
        r"shapes differ: float32\[6, 4, 8\] and float32\[6, 4, 7\]",
    ),
    "stack dtypes": (lambda: ex.stack([X, leaf("z", (6, 4, 8), "bfloat16")], 0), "dtypes differ"),
    "unknown is not float64": (
        lambda: ex.stack([leaf("z", (2,), "float64"), ex.read("q", LeafSpec((2,), None))], 0),
        "dtypes differ",
    ),
    "concat ranks": (lambda: ex.concat([leaf("a", (3,)), leaf("b", ())], 0), "shapes differ besides axis 0"),
    "concat shapes": (lambda: ex.concat([X, leaf("z", (6, 4, 7))], 0), "shapes differ besides axis 0"),
    "transpose": (lambda: ex.transpose(X, (0, 1)), "is not an order of the 3 axes"),
    "reshape": (lambda: ex.reshape(X, (5, -1)), "cannot be reshaped"),
    "complex": (lambda: ex.cast(leaf("c", (2,), "complex64"), np.float32), "the imaginary part would be lost"),
    "string": (lambda: ex.cast(ex.read("s", LeafSpec(kind="string")), np.int32), "a string cannot be cast to int32"),
    "key": (
        lambda: ex.cast(leaf("k", (), "uint32", kind="key", stored_shape=(2,)), np.int32),
        "a PRNG key cannot be cast",
    ),
    "empty": (lambda: ex.transpose(ex.read("e", LeafSpec(kind="empty", empty="None"))), "is not an array"),
    "keys of two kinds": (
        lambda: ex.stack(
            [leaf(i, (), "uint32", kind="key", key_impl=i, stored_shape=(2,)) for i in ("threefry2x32", "rbg")], 0
        ),
        "dtypes differ",
    ),
    "affine on integers": (lambda: ex.affine(leaf("i", (2,), "int4"), shift=1), "is not floating-point"),
    "lora": (
        lambda: ex.merge_lora(leaf("w", (2, 2)), leaf("a", (2, 1)), leaf("b", (2, 2))),
        "do not fit the form 'product'",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(make, message: str):
    with pytest.raises(TransformError, match=message):
        make()


def test_deep_and_shared_expressions_compare_in_linear_time():
    def tower():
        x = leaf("x", (2, 2))
        for _ in range(5000):
            x = Stack((ex.index(x, 0, 0), ex.index(x, 0, 1), ex.index(x, 0, 0)), 0)
            x = Slice(x, 0, 0, 2)
        return x

    a, b = tower(), tower()
    start = time.perf_counter()
    assert a == b
    assert time.perf_counter() - start < 5


def test_joining_parts_that_are_empty_along_another_axis_keeps_them():
    empty = ex.slice_(X, 0, 2, 2)
    assert ex.concat([empty, empty], 1).shape == (0, 8, 8)
