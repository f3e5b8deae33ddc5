"""Random trees of leaves, their data, and random sequences of transforms on them."""

import json
import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from orbaxkit import transforms as t
from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath
from orbaxkit.planning import Plan
from orbaxkit.planning.host import evaluate
from orbaxkit.planning.nodes import Read
from orbaxkit.planning.numbers import is_exact_cast
from orbaxkit.specs import DTYPES, LeafSpec, Specs

NARROW = "bool int8 int16 int32 uint8 uint32 float16 float32 bfloat16 int4 uint4 float8_e4m3fn float8_e5m2 complex64"
ALL = (*NARROW.split(), "int64", "uint64", "float64", "complex128", "float8_e4m3b11fnuz", "float4_e2m1fn", "int2")

KEYS = st.sampled_from(["a", "layers", "kernel", "0", "x.y", "mlp/~/linear", "", "a b", "é"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


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
    return st.one_of(arrays, arrays, arrays, others, keys)


def trees(dtypes: tuple[str, ...] = ALL) -> st.SearchStrategy[Specs]:
    """Nested dicts, lists and tuples with such leaves."""
    nodes = st.recursive(
        leaf_specs(dtypes),
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
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


def quoted(name: str) -> str:
    """A single key as a pattern segment."""
    return json.dumps(name, ensure_ascii=False)


Step = Callable[[Plan], Plan]


@st.composite
def steps(draw, plan: Plan, count: int) -> Step | None:
    """One transform that applies to the plan, or None where the draw has none."""
    names = [n for n, o in plan.outputs.items() if o.expr.kind not in ("string", "empty")]
    if not names:
        return None
    name = draw(st.sampled_from(names))
    expr = plan.outputs[name].expr
    shape, ndim = expr.shape, len(expr.shape)
    kind = draw(st.sampled_from(["transpose", "unstack", "split", "flatten", "rename", "cast", "concat", "stack"]))
    axis = draw(st.integers(0, ndim - 1)) if ndim else None
    if kind == "transpose":
        return t.transpose(name, draw(st.permutations(range(ndim))))
    if kind == "unstack" and axis is not None and shape[axis]:
        return t.unstack(name, into=f"u{count}_{{i}}", axis=axis)
    if kind == "split" and axis is not None:
        cut = draw(st.integers(0, shape[axis]))
        return t.split(name, into=[f"s{count}a", f"s{count}b"], axis=axis, sizes=[cut, shape[axis] - cut])
    if kind == "flatten":
        return t.reshape(name, (math.prod(shape),))
    if kind == "rename":
        return t.rename({name: f"r{count}/{quoted(str(plan.outputs[name].path[-1]))}"})
    if kind == "cast" and expr.element.is_numeric:
        exact = [d for d in NARROW.split() if is_exact_cast(expr.dtype, DTYPES[d])]
        return t.cast(draw(st.sampled_from(exact)), name) if exact else None
    if kind == "concat" and axis is not None:
        return t.chain(t.split(name, into=["k1", "k2"], axis=axis, sizes=[shape[axis], 0]), _joined(name, count, axis))
    if kind == "stack":
        stems = [n for n in names if n.endswith("_0") and plan.outputs[n].path[-1].startswith("u")]
        return t.stack(f"{stems[0][:-2]}_{{i}}", into=f"t{count}", axis=draw(st.integers(0, 2))) if stems else None
    return None


def _joined(name: str, count: int, axis: int) -> Step:
    parent = name.rpartition("/")[0] if '"' not in name else None
    head = "" if not parent else f"{parent}/"
    return t.concat([f"{head}k1", f"{head}k2"], into=f"c{count}", axis=axis) if parent is not None else t.chain()


@st.composite
def plans(draw, dtypes: tuple[str, ...] = ALL, most: int = 5) -> Plan:
    """A random tree under random transforms; steps that do not fit are left out."""
    plan = Plan.identity(draw(trees(dtypes)))
    for count in range(draw(st.integers(0, most))):
        step = draw(steps(plan, count))
        if step is not None:
            try:
                plan = step(plan)
            except TransformError:
                continue
    return plan
