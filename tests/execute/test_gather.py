"""Gathered outputs equal numpy's evaluation, whatever is cut, joined and cast, and no chunk is decoded twice."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbaxkit.execute.gather import Gather
from orbaxkit.execute.pieces import full, is_gathered, slices
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.host import evaluate
from orbaxkit.specs import DTYPES, LeafSpec, Specs


@dataclass
class Arrays:
    """A source over arrays in memory, which counts the elements it is asked for."""

    arrays: dict[str, np.ndarray]
    chunk: tuple[int, ...] | None = None
    elements_read: int = field(default=0)
    notes = warnings = ()
    writer = None

    @property
    def specs(self) -> Specs:
        return Specs.of(
            ((name,), LeafSpec(a.shape, a.dtype, chunk_shape=self.chunk)) for name, a in self.arrays.items()
        )

    def read(self, name, index, out):
        out[...] = self.arrays[name][index]
        self.elements_read += out.size
        return self

    def result(self):
        return None

    def value(self, name):
        raise KeyError(name)

    def problems(self, names):
        return []


A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
B = -np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@st.composite
def gathered(draw, depth=3):
    """A random expression over A and B of shape (2, 3, 4) or what cutting and joining makes of it."""
    if depth == 0 or draw(st.booleans()):
        return ex.read(draw(st.sampled_from("AB")), LeafSpec((2, 3, 4), DTYPES["float32"]))
    x = draw(gathered(depth=depth - 1))
    ndim = len(x.shape)
    op = draw(
        st.sampled_from(["index", "slice", "stack", "concat", "cast"] if ndim and all(x.shape) else ["stack", "cast"])
    )
    axis = draw(st.integers(0, max(ndim - 1, 0)))
    if op == "index":
        return ex.index(x, axis, draw(st.integers(0, x.shape[axis] - 1)))
    if op == "slice":
        start = draw(st.integers(0, x.shape[axis]))
        return ex.slice_(x, axis, start, draw(st.integers(start, x.shape[axis])))
    if op == "cast":
        return ex.cast(x, draw(st.sampled_from([DTYPES["bfloat16"], DTYPES["float32"], DTYPES["int32"]])))
    if op == "stack":
        return ex.stack([x, x], draw(st.integers(0, ndim)))
    return ex.concat([x, ex.slice_(x, axis, 0, x.shape[axis] // 2)], axis)


@given(gathered(), st.data())
def test_any_part_equals_numpy(expr, data):
    source = Arrays({"A": A, "B": B}, chunk=(1, 3, 2))
    part = tuple((low := data.draw(st.integers(0, size)), data.draw(st.integers(low, size))) for size in expr.shape)
    got = []
    gather = Gather(source)
    assert is_gathered(expr)
    gather.want(expr, part, got.append)
    gather.run()
    want = evaluate(expr, lambda leaf: source.arrays[leaf.name])[slices(part)]
    assert got[0].shape == want.shape
    assert got[0].dtype == want.dtype
    assert got[0].tobytes() == np.ascontiguousarray(want).tobytes()


def _gather(source: Arrays, *exprs) -> list[np.ndarray]:
    gather, got = Gather(source), []
    for expr in exprs:
        gather.want(expr, full(expr.shape), got.append)
    gather.run()
    return got


def test_layers_of_one_chunk_are_read_once():
    source = Arrays({"A": A})
    leaf = ex.read("A", LeafSpec(A.shape, A.dtype))
    layers = _gather(source, *(ex.index(leaf, 1, i) for i in range(3)))
    assert source.elements_read == A.size
    np.testing.assert_array_equal(np.stack(layers, 1), A)


def test_layers_with_a_chunk_each_are_read_alone():
    source = Arrays({"A": A}, chunk=(2, 1, 4))
    leaf = ex.read("A", LeafSpec(A.shape, A.dtype))
    _gather(source, ex.index(leaf, 1, 0), ex.index(leaf, 1, 2))
    assert source.elements_read == A.size * 2 // 3


def test_host_arrays_start_at_a_multiple_of_64():
    (whole,) = _gather(Arrays({"A": A}), ex.read("A", LeafSpec(A.shape, A.dtype)))
    assert whole.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("parts", "chunks_read"),
    [
        ([((0, 6), (0, 8)), ((6, 12), (0, 8))], 3),  # both need the middle chunk
        ([((0, 6), (0, 4)), ((0, 6), (4, 8)), ((6, 12), (0, 4)), ((6, 12), (4, 8))], 6),
        ([((0, 4), (0, 8)), ((12, 16), (0, 8))], 2),  # nothing in common, nothing between
    ],
    ids=["rows", "blocks", "apart"],
)
def test_parts_that_meet_within_chunks_decode_each_once(parts, chunks_read):
    whole = np.arange(1600, dtype=np.float32).reshape(200, 8)  # of which a process needs but a corner
    chunk = (4, 8) if chunks_read < 6 else (4, 4)
    source, got = Arrays({"A": whole}, chunk=chunk), []
    gather = Gather(source)
    for part in parts:
        gather.want(ex.read("A", LeafSpec(whole.shape, whole.dtype)), part, got.append)
    gather.run()
    assert source.elements_read == chunks_read * np.prod(chunk)
    assert sorted(int(part[0, 0]) for part in got) == sorted(int(whole[a[0], b[0]]) for a, b in parts)
