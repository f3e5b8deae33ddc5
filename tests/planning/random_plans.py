"""Random trees of leaves, their data, and random sequences of transforms on them."""

import json
import math
import re
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from orbaxkit import transforms as t
from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath
from orbaxkit.planning import Plan, fold
from orbaxkit.planning.host import evaluate
from orbaxkit.planning.nodes import Cast, Read
from orbaxkit.planning.numbers import is_exact_cast
from orbaxkit.specs import DTYPES, LeafSpec, Specs

NARROW = "bool int8 int16 int32 uint8 uint32 float16 float32 bfloat16 int4 uint4 float8_e4m3fn float8_e5m2 complex64"
ALL = (*NARROW.split(), "int64", "uint64", "float64", "complex128", "float8_e4m3b11fnuz", "float4_e2m1fn", "int2")

KEYS = st.sampled_from(["a", "layers", "kernel", "0", "x.y", "mlp/~/linear", "", "a b", "é"])
SHAPES = st.lists(st.sampled_from([2, 3, 1, 0]), min_size=0, max_size=3).map(tuple)


def leaf_specs(dtypes: tuple[str, ...] = ALL) -> st.SearchStrategy[LeafSpec]:
    """Arrays mostly; also numbers, strings, empty nodes and PRNG keys."""
    arrays = st.builds(
        lambda shape, dtype, kind: LeafSpec(shape, DTYPES[dtype], kind),
        SHAPES,
        st.sampled_from(dtypes),
        st.sampled_from(["array", "array", "numpy"]),
    )
    others = st.sampled_from(
        [LeafSpec(kind="string"), LeafSpec(kind="empty", empty="Dict"), LeafSpec((), DTYPES["int32"], "scalar")]
    )
    keys = SHAPES.map(lambda s: LeafSpec(s, DTYPES["uint32"], "key", stored_shape=(*s, 2), key_impl="threefry2x32"))
    return st.one_of(arrays, arrays, arrays, arrays, keys, others)


def trees(dtypes: tuple[str, ...] = ALL) -> st.SearchStrategy[Specs]:
    """Nested dicts, lists and tuples with such leaves."""
    alike = leaf_specs(dtypes).map(lambda spec: {"u9_0": spec, "u9_1": spec, "s9a": spec, "s9b": spec})
    nodes = st.recursive(
        st.one_of(leaf_specs(dtypes), alike),
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=4,
    )
    inner_nodes = st.dictionaries(KEYS, nodes, min_size=1, max_size=3)
    return inner_nodes.map(lambda tree: Specs.of(list(_leaves(tree, ()))))


def _leaves(node, path: KeyPath):
    if isinstance(node, LeafSpec):
        yield path, node
        return
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(child, (*path, key))


def data_for(specs: Specs, seed: int) -> dict[str, np.ndarray]:
    """Random bits for every array: NaNs with payloads, -0.0 and subnormal numbers among them."""
    rng = np.random.default_rng(seed)
    return {name: _bits(spec, rng) for name, spec in specs.leaves.items() if spec.kind not in ("string", "empty")}


def _bits(spec: LeafSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.dtype.kind == "b":
        return rng.integers(0, 2, spec.data_shape).astype(bool)
    raw = rng.bytes(math.prod(spec.data_shape) * spec.dtype.itemsize)
    if spec.dtype.name.lstrip("u") in ("int4", "int2", "float4_e2m1fn"):  # stored in the low bits of a byte
        bits = 2 if spec.dtype.name.endswith("2") else 4
        raw = bytes(b & (1 << bits) - 1 for b in raw)
        if not spec.dtype.name.startswith(("u", "f")):
            raw = bytes(((b ^ (1 << bits - 1)) - (1 << bits - 1)) & 0xFF for b in raw)
    return np.frombuffer(raw, spec.dtype).reshape(spec.data_shape)


def run(plan: Plan, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Evaluate every output that has data."""

    def read(leaf: Read) -> np.ndarray:
        return data[leaf.name]

    return {n: evaluate(o.expr, read) for n, o in plan.outputs.items() if o.expr.kind not in ("string", "empty")}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Shapes, dtypes and every bit (of types smaller than a byte only those that count)."""
    if a.shape == b.shape and a.dtype == b.dtype and a.dtype.name.lstrip("u") in ("int2", "int4"):
        return bool((a.astype(np.int8) == b.astype(np.int8)).all())
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, but for NaNs: which NaN a cast makes of a NaN is the hardware's affair."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    is_nan = (a != a) & (b != b)
    return same_bits(np.where(is_nan, np.zeros((), a.dtype), a), np.where(is_nan, np.zeros((), b.dtype), b))


def is_same(plan: Plan) -> Callable[[np.ndarray, np.ndarray], bool]:
    """How to compare what a plan makes: bit by bit, where nothing is cast."""
    casts: list[bool] = []
    fold([o.expr for o in plan.outputs.values()], lambda node, _: casts.append(isinstance(node, Cast)))
    return same_values if any(casts) else same_bits


def quoted(name: str) -> str:
    """A single key as a pattern segment."""
    return json.dumps(name, ensure_ascii=False)


Step = Callable[[Plan], Plan]


@st.composite
def steps(draw: st.DrawFn, plan: Plan, count: int) -> Step | None:
    """One transform that applies to the plan, or None where it has no arrays."""
    names = [n for n, o in plan.outputs.items() if o.expr.kind not in ("string", "empty")]
    if not names:
        return None
    name = draw(st.sampled_from(names))
    expr = plan.outputs[name].expr
    shape, axes = expr.shape, range(len(expr.shape))
    made: list[Step] = [
        t.rename({name: f"r{count}/{quoted(str(plan.outputs[name].path[-1]))}"}),
        t.reshape(name, (math.prod(shape),)),
        t.transpose(name, draw(st.permutations(axes))),
        *(t.unstack(name, into=f"u{count}_{{i}}", axis=axis) for axis in axes if shape[axis]),
        *(_split(name, count, shape, axis, draw(st.integers(0, shape[axis]))) for axis in axes),
        *_stacks(names, count, draw(st.integers(0, 1))) * 3,
        *_concats(names, count, draw(st.integers(0, 1))) * 3,
    ]
    if expr.element.is_numeric:
        made += [t.cast(d, name) for d in NARROW.split() if is_exact_cast(expr.dtype, DTYPES[d])][:2]
    return draw(st.sampled_from(made))


def _split(name: str, count: int, shape: tuple[int, ...], axis: int, cut: int) -> Step:
    return t.split(name, into=[f"s{count}a", f"s{count}b"], axis=axis, sizes=[cut, shape[axis] - cut])


def _stacks(names: list[str], count: int, axis: int) -> list[Step]:
    """Stacks of what an unstack left."""
    stems = dict.fromkeys(found[1] for name in names if (found := re.fullmatch(r"(.*\bu\d_)\d+", name)))
    return [t.stack(f"{stem}{{i}}", into=f"t{count}", axis=axis) for stem in stems]


def _concats(names: list[str], count: int, axis: int) -> list[Step]:
    """Both halves of a split, in order and the other way round."""
    halves = [name for name in names if re.search(r"\bs\da$", name) and f"{name[:-1]}b" in names]
    pairs = [[half, f"{half[:-1]}b"] for half in halves]
    return [t.concat(order, into=f"c{count}", axis=axis) for pair in pairs for order in (pair, pair[::-1])]


@st.composite
def plans(draw: st.DrawFn, dtypes: tuple[str, ...] = ALL, most: int = 6) -> Plan:
    """A random tree under random transforms; steps that do not fit are left out."""
    plan = Plan.identity(draw(trees(dtypes)))
    for count in range(draw(st.sampled_from(range(most, -1, -1)))):
        step = draw(steps(plan, count))
        if step is not None:
            try:
                plan = step(plan)
            except TransformError:
                continue
    return plan
