"""What safetensors has no place for, as JSON under one key of a file's own metadata.

It says of every leaf which typed path it has and where its value is: in a tensor, tied to another leaf's tensor, or
here. It travels inside the file, so that it is gone once another program writes the file anew.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import checked_sizes, parse_json
from orbaxkit.formats.structure import EMPTY_TYPES, MAX_DEPTH
from orbaxkit.paths import KeyPath
from orbaxkit.specs import Kind, LeafSpec, SavedSharding, Specs

KEY = "orbaxkit"
_VERSION = 1
_KINDS = ("array", "numpy", "scalar", "string", "empty")


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf: `tensor` names where its value is, `tied` that it is another leaf's, `text` is a string's value."""

    path: KeyPath
    kind: Kind
    tensor: str | None = None
    tied: bool = False
    text: str | None = None
    empty: str | None = None
    chunk_shape: tuple[int, ...] | None = None
    shard_shape: tuple[int, ...] | None = None
    sharding: SavedSharding | None = None


@dataclass(frozen=True)
class Sidecar:
    """All leaves in order, the types of containers, and how an Orbax item stored them."""

    entries: tuple[Entry, ...]
    containers: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def encode(
    specs: Specs, tensors: Mapping[str, str], tied: Iterable[str], texts: Mapping[str, str], settings: Any
) -> str:
    """The sidecar of a tree: `tensors` and `texts` by leaf, `tied` the leaves whose tensor is another's."""
    tied = set(tied)
    leaves = [
        _entry(specs.paths[name], spec, tensors.get(name), name in tied, texts.get(name))
        for name, spec in specs.leaves.items()
    ]
    document = {"version": _VERSION, "leaves": leaves, "containers": dict(specs.containers), "settings": settings}
    return json.dumps(document, separators=(",", ":"))


def _entry(path: KeyPath, spec: LeafSpec, tensor: str | None, is_tied: bool, text: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {"path": list(path), "kind": spec.kind}
    found = {
        "tensor": tensor,
        "tied": is_tied or None,
        "text": text,
        "empty": spec.empty,
        "chunks": spec.chunk_shape and list(spec.chunk_shape),
        "shards": spec.shard_shape and list(spec.shard_shape),
        "sharding": spec.sharding and _sharding_document(spec.sharding),
    }
    return out | {key: value for key, value in found.items() if value is not None}


def _sharding_document(sharding: SavedSharding) -> dict[str, Any]:
    if not sharding.axis_names:
        return {"device": sharding.device}
    return {
        "axes": list(sharding.axis_names),
        "mesh": list(sharding.mesh_shape),
        "spec": [list(part) if isinstance(part, tuple) else part for part in sharding.partition],
    }


def decode(text: str, where: str) -> Sidecar:
    """Parse a sidecar; one that is malformed is an error, since the tree would be another without it."""
    found = parse_json(text.encode("utf-8", "surrogatepass"), where)
    try:
        if found["version"] != _VERSION:
            raise CheckpointError(f"its {KEY} metadata has version {str(found['version'])[:20]}", where=where)
        containers, settings = found.get("containers") or {}, found.get("settings") or {}
        if not all(isinstance(value, str) for value in containers.values()) or not isinstance(settings, dict):
            raise TypeError
        return Sidecar(tuple([_decode_entry(entry, where) for entry in found["leaves"]]), containers, settings)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"its {KEY} metadata is malformed", where=where) from None


def _decode_entry(found: Any, where: str) -> Entry:
    path = tuple(found["path"])
    if len(path) > MAX_DEPTH or not all(_is_segment(segment) for segment in path):
        raise ValueError(path)
    texts = [found.get("tensor"), found.get("text"), found.get("empty")]
    is_good = found["kind"] in _KINDS and all(text is None or isinstance(text, str) for text in texts)
    has_value = {"string": found.get("text"), "empty": found.get("empty")}.get(found["kind"], found.get("tensor"))
    if not is_good or has_value is None or (found["kind"] == "empty" and has_value not in EMPTY_TYPES):
        raise ValueError(found["kind"])
    return Entry(
        path,
        found["kind"],
        tensor=found.get("tensor"),
        tied=found.get("tied") is True,
        text=found.get("text"),
        empty=found.get("empty"),
        chunk_shape=_sizes(found.get("chunks"), where),
        shard_shape=_sizes(found.get("shards"), where),
        sharding=_decode_sharding(found.get("sharding"), where),
    )


def _is_segment(segment: Any) -> bool:
    if type(segment) is int:
        return 0 <= segment < 10**9
    return isinstance(segment, str) and "\0" not in segment


def _sizes(found: Any, where: str) -> tuple[int, ...] | None:
    return None if found is None else checked_sizes(found, where, "a chunk's shape")


def _decode_sharding(found: Any, where: str) -> SavedSharding | None:
    if found is None:
        return None
    if "device" in found:
        return SavedSharding(device=str(found["device"])[:200])
    names, mesh = tuple(map(str, found["axes"])), checked_sizes(found["mesh"], where, "the mesh's shape")
    partition = tuple([_axes(part) for part in found["spec"]])
    return SavedSharding(names, mesh, partition) if len(names) == len(mesh) else None


def _axes(part: Any) -> str | tuple[str, ...] | None:
    return part if part is None or isinstance(part, str) else tuple(map(str, part))
