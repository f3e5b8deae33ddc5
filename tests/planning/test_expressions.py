"""Constructors simplify: undoing an operation gives back the very expression."""

import numpy as np

from orbaxkit.planning import expressions as ex
from orbaxkit.specs import LeafSpec

X = ex.read("x", LeafSpec((6, 4, 8), np.dtype("float32")))


def test_a_stack_of_every_index_is_the_array():
    for axis, size in enumerate(X.shape):
        assert ex.stack([ex.index(X, axis, i) for i in range(size)], axis) is X
