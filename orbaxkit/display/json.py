"""A checkpoint as JSON values: stable, documented in the README, for other programs."""

import json
import re
from typing import Any

from orbaxkit.display.tree import has_unknown_bytes, selected
from orbaxkit.paths import KeyPath
from orbaxkit.specs import LeafSpec, SavedSharding, Specs


def to_json(checkpoint: Any, *, select: "str | re.Pattern[str] | None" = None) -> dict[str, Any]:
    """What `inspect --json` prints: the format, the step, and every item's leaves with their typed paths.

    `nbytes` is null where the dtype is not on disk; `path` and `keys` start within the item.
    """
    layout, items = checkpoint.layout, checkpoint.items
    kept = None if select is None else set(selected(checkpoint.specs, select).paths.values())
    return {
        "format": layout.format,
        "step": layout.step,
        "items": {name: _item(specs, (name,) if len(items) > 1 else (), kept) for name, specs in items.items()},
        "steps": [step for step, _ in layout.steps],
        "unfinished": list(layout.unfinished),
        "finished": layout.is_finished,
        "other_items": list(layout.other_items),
        "writer": checkpoint.writer,
        "notes": list(checkpoint.notes),
    }


def dump(found: dict[str, Any]) -> str:
    """JSON text with one leaf per line."""
    items = [f"{json.dumps(name)}: {_dump_item(item)}" for name, item in found["items"].items()]
    rest = {name: value for name, value in found.items() if name != "items"}
    return f'{json.dumps(rest)[:-1]}, "items": {{{", ".join(items)}}}}}'


def _dump_item(item: dict[str, Any]) -> str:
    leaves = ",\n".join(json.dumps(leaf) for leaf in item["leaves"])
    totals = {name: value for name, value in item.items() if name != "leaves"}
    return f'{{"leaves": [\n{leaves}\n], {json.dumps(totals)[1:]}'


def _item(specs: Specs, prefix: KeyPath, kept: set[KeyPath] | None) -> dict[str, Any]:
    names = [n for n, path in specs.paths.items() if kept is None or (*prefix, *path) in kept]
    leaves = [_leaf(name, specs.paths[name], specs.leaves[name]) for name in names]
    return {
        "leaves": leaves,
        "parameters": sum(specs.leaves[name].parameters for name in names),
        "nbytes": sum(specs.leaves[name].nbytes for name in names),
    }


def _leaf(name: str, path: KeyPath, spec: LeafSpec) -> dict[str, Any]:
    return {
        "path": name,
        "keys": list(path),
        "kind": spec.kind,
        "shape": list(spec.shape),
        "dtype": spec.dtype_name,
        "nbytes": None if has_unknown_bytes(spec) else spec.nbytes,
        "stored_bytes": spec.stored_bytes,
        "chunk_shape": None if spec.chunk_shape is None else list(spec.chunk_shape),
        "sharding": None if spec.sharding is None else _sharding(spec.sharding),
    }


def _sharding(sharding: SavedSharding) -> dict[str, Any]:
    return {
        "axis_names": list(sharding.axis_names),
        "mesh_shape": list(sharding.mesh_shape),
        "partition": [list(part) if isinstance(part, tuple) else part for part in sharding.partition],
        "device": sharding.device,
    }
