"""Plans as JSON data and back: the source's specs, a table of nodes, and the outputs that point into it."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from orbaxkit.errors import OrbaxkitError, TransformError
from orbaxkit.paths import format_path
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import NODES, Constant, Element, Expr, Fill, Read, fold
from orbaxkit.planning.numbers import dtype_of
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.specs import LeafSpec, SavedSharding, Specs

VERSION = 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """See `Plan.to_json`."""
    nodes: list[dict[str, Any]] = []
    table: dict[Expr, int] = {}
    problems: dict[str, str] = {}
    outputs = []
    done: dict[int, int] = {}
    for name, output in plan.outputs.items():

        def visit(node: Expr, xs: tuple[int, ...], name: str = name) -> int:
            problem = _unwritable(node)
            if problem:
                problems[name] = problem
                return 0
            if node not in table:
                table[node] = len(nodes)
                nodes.append(_node_to_json(node, xs))
            return table[node]

        outputs.append({"path": list(output.path), "node": fold([output.expr], visit, done)[0]})
    if problems:
        raise TransformError(
            "a plan that JSON cannot hold",
            leaves=problems.items(),
            hint="leave these fills out and add them after loading",
        )
    return {
        "version": VERSION,
        "source": _specs_to_json(plan.source),
        "containers": dict(plan.containers),
        "nodes": nodes,
        "outputs": outputs,
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """See `Plan.from_json`."""
    try:
        if data["version"] != VERSION:
            raise TransformError(f"a plan of version {data['version']!r}, this is version {VERSION}")
        source = _specs_from_json(data["source"])
        nodes: list[Expr] = []
        for entry in data["nodes"]:
            nodes.append(_node_from_json(entry, nodes, source))
        paths = [tuple(entry["path"]) for entry in data["outputs"]]
        outputs = {format_path(p): Output(p, nodes[e["node"]]) for p, e in zip(paths, data["outputs"], strict=True)}
        return Plan(source, outputs, dict(data["containers"]))
    except OrbaxkitError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TransformError(f"this is not a plan: {type(error).__name__}: {error}") from error


def _unwritable(node: Expr) -> str | None:
    if isinstance(node, Fill) and isinstance(node.value, (Constant, complex)):
        return f"is filled with {node.value!r}"
    if isinstance(node, Read) and node.source is not None:
        return f"is filled from {node.source.label}"
    return None


def _node_to_json(node: Expr, xs: tuple[int, ...]) -> dict[str, Any]:
    kind = type(node).__name__
    if isinstance(node, Read):
        return {"op": kind, "name": node.name}
    if isinstance(node, Fill):
        value = node.value if _is_finite(node.value) else str(node.value)  # JSON has no NaN
        return {"op": kind, "value": value, "shape": list(node.shape), "element": _element_to_json(node.element)}
    own = {
        entry.name: _plain(getattr(node, entry.name))
        for entry in fields(node)
        if entry.name not in ("x", "xs", "w", "a", "b")
    }
    return {"op": kind, "of": list(xs), **own}


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def _node_from_json(entry: Mapping[str, Any], nodes: list[Expr], source: Specs) -> Expr:
    """Through the constructors, which check the arguments again."""
    own = dict(entry)
    kind = own.pop("op")
    xs = [nodes[_earlier(k, nodes)] for k in own.pop("of", [])]
    if kind not in NODES:
        raise TransformError(f"{kind!r} is not an operation of plans")
    if kind == "Read":
        return ex.read(own["name"], source[own["name"]])
    if kind == "Fill":
        element, value = _element_from_json(own["element"]), own["value"]
        is_number = element.is_numeric and isinstance(value, str)
        return ex.fill(float(value) if is_number else value, tuple(own["shape"]), element)
    verb = getattr(ex, {"MergeLora": "merge_lora", "Slice": "slice_"}.get(kind, kind.lower()))
    args = (xs,) if kind in ("Stack", "Concat") else xs
    return verb(*args, **own)


def _earlier(k: int, nodes: list[Expr]) -> int:
    if not 0 <= k < len(nodes):
        raise TransformError(f"node {k} is used before it is made")
    return k


def _element_to_json(element: Element) -> dict[str, Any]:
    dtype = None if element.dtype is None else element.dtype.name
    return {"dtype": dtype, "kind": element.kind, "key_impl": element.key_impl, "words": list(element.words)}


def _element_from_json(data: Mapping[str, Any]) -> Element:
    dtype = None if data["dtype"] is None else dtype_of(data["dtype"])
    return Element(dtype, data["kind"], data["key_impl"], tuple(data["words"]))


def _specs_to_json(specs: Specs) -> dict[str, Any]:
    leaves = [{"path": list(specs.paths[name]), **_spec_to_json(spec)} for name, spec in specs.leaves.items()]
    return {"leaves": leaves, "containers": dict(specs.containers)}


def _spec_to_json(spec: LeafSpec) -> dict[str, Any]:
    """Fields at their defaults are left out."""
    out: dict[str, Any] = {}
    for entry in fields(LeafSpec):
        value = getattr(spec, entry.name)
        if entry.name == "sharding" and value is not None:
            out["sharding"] = {f.name: _nested(getattr(value, f.name)) for f in fields(value)}
        elif value is not entry.default and (entry.default is None or value != entry.default):
            out[entry.name] = _plain(value)
    return out


def _nested(value: Any) -> Any:
    return [_nested(v) for v in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _specs_from_json(data: Mapping[str, Any]) -> Specs:
    leaves = []
    for entry in data["leaves"]:
        known = {name: _tupled(value) for name, value in entry.items() if name != "path"}
        if "dtype" in known:
            known["dtype"] = dtype_of(known["dtype"])
        if "sharding" in known:
            known["sharding"] = SavedSharding(**{name: _tupled(value) for name, value in known["sharding"].items()})
        leaves.append((tuple(entry["path"]), LeafSpec(**known)))
    return Specs.of(leaves, data["containers"])
