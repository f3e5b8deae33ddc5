"""Plans run from source to sink give what numpy gives, in parts of any size, copied or decoded."""

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.random_plans import data_for, is_same, plans, run, same_bits

import orbaxkit as ok
from orbaxkit.errors import CheckpointError
from orbaxkit.execute.memory import MemorySource
from orbaxkit.execute.pieces import slices
from orbaxkit.execute.restricting import restrict
from orbaxkit.execute.sequential import SequentialSource
from orbaxkit.execute.streaming import stream
from orbaxkit.execute.windows import slabs
from orbaxkit.formats.decoding import crc32c
from orbaxkit.formats.frames import frame_problem, has_holes, value_problem
from orbaxkit.formats.orbax_sink import OrbaxSettings, OrbaxSink
from orbaxkit.formats.value_stream import slabs as rows_of
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.planning import Plan
from orbaxkit.planning.host import evaluate
from orbaxkit.specs import LeafSpec, Specs

# What TensorStore stores, so that plans can be run on disk.
STORED = ("bool", "int8", "int32", "float16", "float32", "bfloat16", "int4", "float8_e4m3fn", "complex64", "int64")


@st.composite
def spans(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    out = []
    for size in shape:
        start = draw(st.integers(0, size))
        out.append((start, draw(st.integers(start, size))))
    return tuple(out)


@given(st.data(), plans(), st.integers(0, 2**32 - 1))
def test_a_part_of_an_output_is_that_part_of_the_whole(data: st.DataObject, plan: Plan, seed: int):
    arrays = data_for(plan.source, seed)
    whole = run(plan, arrays)
    for name, expected in whole.items():
        expr = plan.outputs[name].expr
        part = data.draw(spans(expr.shape))
        found = evaluate(restrict(expr, part), lambda read: arrays[read.name])
        assert is_same(plan)(np.asarray(found), expected[(*slices(part), ...)])


@dataclass
class Collected:
    """A sink in memory that wants its leaves in small parts."""

    part_bytes: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    specs: Specs = field(default_factory=lambda: Specs({}, {}))

    def begin(self, specs: Specs, tied: Any = None) -> None:
        self.specs = specs
        for name, spec in specs.items():
            if spec.kind in ("array", "numpy", "key"):
                self.arrays[name] = np.full(spec.data_shape, 1, np.uint8).astype(spec.dtype)

    def parts(self, name: str) -> Iterator[Any]:
        spec = self.specs[name]
        if spec.nbytes:
            words = tuple((0, n) for n in spec.data_shape[len(spec.shape) :])
            for part in rows_of(
                tuple((0, n) for n in spec.shape), spec.nbytes // math.prod(spec.shape), self.part_bytes
            ):
                yield part + words

    def write(self, name: str, part: Any, data: np.ndarray) -> None:
        assert data.dtype == self.specs[name].dtype
        self.arrays[name][(*slices(part), ...)] = data

    def accepts_encoded(self, name: str, array: Any) -> bool:
        return False

    def write_encoded(self, name: str, key: str, value: Any) -> None:
        raise AssertionError("nothing encoded was accepted")

    def value(self, name: str, value: Any) -> None:
        self.values[name] = value

    def close(self) -> Path:
        return Path()

    def abort(self) -> None:
        return None


def chunked(specs: Specs, chunk: int) -> Specs:
    """The same leaves, as if stored in chunks of so many positions along each axis."""

    def of(spec: LeafSpec) -> LeafSpec:
        grid = tuple(min(chunk, size) or 1 for size in spec.shape)
        return replace(spec, chunk_shape=grid + spec.data_shape[len(spec.shape) :]) if spec.dtype is not None else spec

    return Specs({name: of(spec) for name, spec in specs.items()}, specs.paths, specs.containers)


def source_of(plan: Plan, seed: int) -> MemorySource:
    """Random data for a plan's source: keys as their words, numbers as numpy scalars."""
    data: dict[str, Any] = data_for(plan.source, seed)
    for name, spec in plan.source.items():
        if spec.kind == "scalar":
            data[name] = data[name][()]
        elif spec.kind == "string":
            data[name] = "text"
    # Words of keys are plain integers here: no jax is needed to read them.
    specs = {n: replace(s, kind="array", shape=s.data_shape) if s.kind == "key" else s for n, s in plan.source.items()}
    return MemorySource(Specs(specs, plan.source.paths, plan.source.containers), data)


def without_keys(plan: Plan) -> Plan:
    keys = {name for name, output in plan.outputs.items() if output.expr.kind == "key"}
    return plan.with_outputs({name: output for name, output in plan.outputs.items() if name not in keys})


@given(plans(), st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 64, 1 << 20]))
def test_streaming_gives_what_numpy_gives(plan: Plan, seed: int, part_bytes: int):
    plan = without_keys(plan)
    source = source_of(plan, seed)
    sink = Collected(part_bytes)
    stream(plan, source, sink)
    for name, expected in run(plan, data_for(plan.source, seed)).items():
        if name in sink.values:
            assert same_bits(np.asarray(sink.values[name], expected.dtype), expected)
        else:
            assert is_same(plan)(sink.arrays[name], expected)


@settings(max_examples=30)
@given(
    plans(STORED),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.sampled_from([("zarr", "zstd"), ("zarr3", "zstd"), ("zarr", "raw"), ("zarr3", "raw")]),
)
def test_a_plan_run_on_disk_is_that_plan_run_in_memory(plan: Plan, seed: int, chunk: int, storage: tuple[str, str]):
    """Through stored chunks of any grid, most of them copied without decoding."""
    plan = without_keys(plan)
    with TemporaryDirectory() as folder:
        first = OrbaxSink(f"{folder}/in", OrbaxSettings(*storage))
        specs = chunked(plan.source.subset(n for n, s in plan.source.items() if s.kind != "key"), chunk)
        names = {".".join(map(str, path)) for path in specs.paths.values()}
        if len(names) < len(specs.paths) or names & {".", ".."}:  # which no sink takes
            return
        held = source_of(plan, seed)
        stream(Plan.identity(specs), MemorySource(specs, held.values), first)
        first.close()
        opened = ok.open(f"{folder}/in").source
        if set(opened.specs) != set(specs):  # keys that Orbax's own names cannot tell apart
            return
        moved = Plan(opened.specs, plan.outputs, plan.containers)
        sink = Collected(1 << 20)
        stream(moved, opened, sink)
        for name, expected in run(plan, data_for(plan.source, seed)).items():
            if name not in sink.values:
                assert is_same(plan)(sink.arrays[name], expected)


@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.integers(1, 200), st.integers(1, 4))
def test_slabs_cover_an_array_once_and_in_order(shape: tuple[int, ...], most: int, chunk: int):
    spec = LeafSpec(shape, np.dtype("int32"), chunk_shape=tuple(min(chunk, size) for size in shape))
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    seen = [numbers[slices(part)].reshape(-1) for part in slabs(spec, most)]
    assert np.concatenate(seen).tolist() == list(range(numbers.size))
    row = numbers.itemsize
    assert all(part.nbytes <= max(most, row) for part in seen)


# Large stored values, decoded in order.

ROWS = np.random.default_rng(0).standard_normal((4500, 1024), np.float32)


@pytest.fixture(scope="module", params=["zstd", "raw"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    sink = OrbaxSink(tmp_path_factory.mktemp("large") / "in", OrbaxSettings(codec=request.param))
    spec = LeafSpec(ROWS.shape, ROWS.dtype, chunk_shape=ROWS.shape)
    stream(Plan.identity(Specs.of([(("w",), spec)])), MemorySource(Specs.of([(("w",), spec)]), {"w": ROWS}), sink)
    return ok.open(sink.close()).source


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1000), (1000, 2000), (2000, 4500)],
        [(500, 600), (4400, 4500)],
        [(3000, 3001), (10, 20), (4499, 4500)],
        [(0, 4500)],
    ],
    ids=["in order", "with gaps", "backwards", "whole"],
)
def test_parts_of_a_large_value_can_be_read_in_any_order(large: Any, parts: list[tuple[int, int]]):
    source = SequentialSource(large)
    for start, stop in parts:
        out = np.empty((stop - start, 1024), np.float32)
        source.read("w", (slice(start, stop), slice(0, 1024)), out).result()
        assert np.array_equal(out, ROWS[start:stop])
    source.finish()


def test_regions_that_are_no_run_of_bytes_are_read_all_the_same(large: Any):
    out = np.empty((4500, 3), np.float32)
    SequentialSource(large).read("w", (slice(0, 4500), slice(5, 8)), out).result()
    assert np.array_equal(out, ROWS[:, 5:8])


def test_a_large_leaf_is_cast_within_a_limit_smaller_than_it(large: Any, tmp_path: Path):
    plan = ok.plan(large, ok.cast("bfloat16"))
    sink = OrbaxSink(tmp_path / "out", part_bytes=1 << 20)
    stream(ok.plan(large), large, Collected(1 << 20), memory_limit=8 << 20)  # imports and caches
    tracemalloc.start()
    stream(plan, large, sink, memory_limit=8 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sink.close()
    assert peak < 14 << 20 < ROWS.nbytes
    written = ok.restore(tmp_path / "out", as_numpy=True)["w"]
    assert same_bits(np.asarray(written), ROWS.astype(written.dtype))


# Frames.


def read_from(data: bytes) -> Any:
    return lambda size, at: data[at : at + size]


FRAMES = st.lists(st.binary(max_size=300_000 // 64).map(lambda b: b * 64), min_size=1, max_size=3)


@settings(max_examples=50)
@given(FRAMES, st.booleans(), st.booleans(), st.data())
def test_whole_frames_are_told_from_cut_ones(parts: list[bytes], has_size: bool, has_sum: bool, data: st.DataObject):
    encoder = zstandard.ZstdCompressor(write_content_size=has_size, write_checksum=has_sum)
    if not has_size:
        parts = parts[:1]
    encoded = b"".join(encoder.compress(part) for part in parts)
    decoded = sum(map(len, parts))
    assert frame_problem(read_from(encoded), len(encoded), decoded) is None
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    if cut or decoded:
        assert frame_problem(read_from(cut), len(cut), decoded) is not None


@given(st.binary(max_size=200), st.integers(0, 1 << 60))
def test_any_bytes_are_judged_without_a_crash_or_a_hang(data: bytes, decoded: int):
    problem = frame_problem(read_from(data), len(data), decoded)
    assert problem is None or isinstance(problem, str)


SHARDS = ZarrArray("zarr3", (8, 4), np.dtype("f4"), (2, 2), (4, 4), "/", "c", "raw")


@given(st.binary(max_size=200), st.booleans(), st.sampled_from(["raw", "zstd"]))
def test_any_bytes_are_judged_as_a_shard_without_a_crash(data: bytes, has_index: bool, codec: str):
    data = data + crc32c(data[-64:]).to_bytes(4, "little") if has_index else data
    problem = value_problem(read_from(data), len(data), replace(SHARDS, codec=codec))
    assert problem is None or isinstance(problem, str)
    assert has_holes(read_from(data), len(data), SHARDS, (4, 4)) in (True, False)


def shard(*entries: tuple[int, int], data: bytes = bytes(64)) -> bytes:
    index = b"".join(number.to_bytes(8, "little") for entry in entries for number in entry)
    return data + index + crc32c(index).to_bytes(4, "little")


NONE = (2**64 - 1, 2**64 - 1)
WHOLE = [(at, 16) for at in (0, 16, 32, 48)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (shard(*WHOLE), None),
        (shard(*WHOLE[:3], NONE), None),
        (shard(*WHOLE[:3], (49, 16)), "its shard names bytes past its end"),
        (shard(*WHOLE[:3], (2**63, 2**63)), "its shard names bytes past its end"),
        (shard(*WHOLE[:3], (48, 15)), "chunk 3 of its shard: has 15 of 16 bytes"),
        (shard(NONE, NONE, NONE, NONE), "its shard holds no chunk"),
        (shard(*WHOLE)[:-1], "the index of its shard is damaged (CRC-32C)"),
        (bytes(67), "its shard is cut short"),
        (b"", "its shard is cut short"),
    ],
    ids=["whole", "a hole", "past the end", "far past", "short", "nothing", "cut", "no index", "empty"],
)
def test_shards_are_judged_by_their_index(data: bytes, problem: str | None):
    assert value_problem(read_from(data), len(data), SHARDS) == problem


@pytest.mark.parametrize(
    ("inside", "missing", "is_hole"),
    [((4, 4), 3, True), ((4, 2), 3, False), ((2, 4), 1, True), ((2, 4), 2, False), ((1, 1), 0, True)],
)
def test_chunks_beyond_the_edge_of_the_array_are_no_holes(inside: tuple[int, int], missing: int, is_hole: bool):
    data = shard(*[NONE if i == missing else entry for i, entry in enumerate(WHOLE)])
    assert has_holes(read_from(data), len(data), SHARDS, inside) == is_hole


def test_frames_some_of_which_do_not_say_their_size_are_whole():
    with_size, without = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(write_content_size=False)
    data = with_size.compress(bytes(50)) + without.compress(bytes(30)) + with_size.compress(bytes(20))
    assert frame_problem(read_from(data), len(data), 100) is None
    assert frame_problem(read_from(data), len(data), 60) == "decodes to 70 bytes, its shape has 60"


def test_frames_that_decode_to_another_size_are_told():
    data = zstandard.compress(bytes(100))
    assert frame_problem(read_from(data), len(data), 99) == "decodes to 100 bytes, its shape has 99"


def test_a_limit_below_the_smallest_part_is_refused_with_the_leaf(large: Any):
    with pytest.raises(ok.OrbaxkitError, match=r"w: needs .* MiB"):
        stream(ok.plan(large, ok.transpose("w")), large, Collected(1 << 20), memory_limit=2 << 20)


def test_errors_of_sinks_come_through(large: Any):
    class Full(Collected):
        def write(self, name: str, part: Any, data: np.ndarray) -> None:
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        stream(ok.plan(large), large, Full(1 << 20))
