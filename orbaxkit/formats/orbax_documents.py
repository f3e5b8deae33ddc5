"""The JSON files of an Orbax item as its newest releases write them, and zarr metadata."""

import base64
import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from orbaxkit.formats.structure import MAX_DEPTH
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.paths import KeyPath, Segment, format_path
from orbaxkit.specs import LeafSpec, SavedSharding, Specs

HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_VALUE_TYPES = {"array": "jax.Array", "key": "jax.Array", "numpy": "np.ndarray", "scalar": "scalar", "string": "string"}
# Releases before 0.12 know a CPU by this name only; later ones know both.
_DEVICE = "TFRT_CPU_0"
_ZARR_2_LEVEL, _ZARR_3_LEVEL = 1, 3


def stored_name(path: KeyPath) -> str:
    """The name under which Orbax stores a leaf; dots inside keys are not escaped."""
    return ".".join(map(str, path))


def tree_key(path: KeyPath) -> str:
    """A leaf's key in `_METADATA`."""
    return str(tuple(map(str, path)))


def is_jax(spec: LeafSpec) -> bool:
    """Whether Orbax gives a leaf back as a jax array."""
    return spec.kind in ("array", "key")


def tree_document(specs: Specs, *, zarr3: bool, custom_metadata: Any) -> bytes:
    """`_METADATA`."""
    document = {
        "tree_metadata": {tree_key(path): _entry(path, specs.leaves[name]) for name, path in specs.paths.items()},
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom_metadata,
    }
    rich = _rich_tree(specs)
    return _json(document | ({} if rich is None else {"value_metadata_tree": json.dumps(rich)}))


def _entry(path: KeyPath, spec: LeafSpec) -> dict[str, Any]:
    keys = [{"key": str(segment), "key_type": 1 if isinstance(segment, int) else 2} for segment in path]
    return {"key_metadata": keys, "value_metadata": _value_metadata(spec)}


def _value_metadata(spec: LeafSpec) -> dict[str, Any]:
    if spec.kind == "empty":
        return {"value_type": spec.empty, "skip_deserialize": True}
    out = {"value_type": _VALUE_TYPES[spec.kind], "skip_deserialize": False}
    return out | {"write_shape": list(spec.data_shape)} if is_jax(spec) else out


def _rich_tree(specs: Specs) -> Any:
    """The types of containers, where they are known: lists, tuples and NamedTuple classes."""
    if not specs.containers or max(map(len, specs.paths.values()), default=0) > MAX_DEPTH:
        return None
    root: dict[Segment, Any] = {}
    for name, path in specs.paths.items():
        if not path:
            return None
        node = root
        for segment in path[:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = specs.leaves[name]
    return _rich(root, (), specs.containers)


def _rich(node: Any, path: KeyPath, containers: Mapping[str, str]) -> Any:
    if isinstance(node, LeafSpec):
        return {"category": "custom", "clazz": "ValueMetadataEntry", "data": _value_metadata(node)}
    children = {key: _rich(child, (*path, key), containers) for key, child in node.items()}
    kind = containers.get(format_path(path))
    if set(children) == set(range(len(children))):
        entries = [children[i] for i in range(len(children))]
        return {"category": "custom", "clazz": "tuple", "entries": entries} if kind == "tuple" else entries
    if kind is None or kind == "tuple":
        return {str(key): child for key, child in children.items()}
    module, _, name = kind.rpartition(".")
    named = [{"key": str(key), "value": child} for key, child in children.items()]
    return {"category": "namedtuple", "module": module, "clazz": name, "entries": named}


def array_metadatas_document(leaves: Iterable[tuple[LeafSpec, str, ZarrArray]]) -> bytes:
    """`array_metadatas/process_0`: the only place that says what a PRNG key is."""
    entries = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": list(array.shape),
                "chunk_shape": list(array.chunk_shape),
                "ext_metadata": {"random_key_impl": spec.key_impl} if spec.kind == "key" else None,
            }
        }
        for spec, name, array in leaves
    ]
    return _json({"array_metadatas": entries})


def sharding_document(leaves: Iterable[tuple[LeafSpec, str]]) -> bytes:
    """`_sharding`, without which Orbax restores nothing it was not given a sharding for.

    A leaf without a saved sharding goes to the device of one that has one, else to the first CPU.
    """
    leaves = list(leaves)
    devices = (spec.sharding.device for spec, _ in leaves if spec.sharding is not None)
    single = SavedSharding(device=next((device for device in devices if device), _DEVICE))
    out = {
        base64.b64encode(name.encode("utf-8", "surrogatepass")).decode(): json.dumps(_sharding(spec, single))
        for spec, name in leaves
    }
    return _json(out)


def _sharding(spec: LeafSpec, single: SavedSharding) -> dict[str, Any]:
    saved = spec.sharding
    if saved is not None and saved.axis_names and len(saved.partition) <= len(spec.shape):
        return {
            "sharding_type": "NamedSharding",
            "shape": list(saved.mesh_shape),
            "axis_names": list(saved.axis_names),
            "partition_spec": [list(part) if isinstance(part, tuple) else part for part in saved.partition],
        }
    device = saved.device if saved is not None and saved.device else single.device
    return {"sharding_type": "SingleDeviceSharding", "device_str": device}


def checkpoint_document(item: str | None, started: int) -> bytes:
    """`_CHECKPOINT_METADATA` of a bare item, or of a step that holds one item of this name."""
    document = {
        "item_handlers": HANDLER if item is None else {item: HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    return _json(document)


def strings_document(strings: Mapping[str, str]) -> bytes:
    """`_strings.json`."""
    return _json(strings)


def zarr_document(array: ZarrArray) -> tuple[str, bytes]:
    """The metadata file of an array, and what is in it."""
    return (".zarray", _json(_zarr_2(array))) if array.driver == "zarr" else ("zarr.json", _json(_zarr_3(array)))


def _zarr_2(array: ZarrArray) -> dict[str, Any]:
    return {
        "chunks": list(array.chunk_shape),
        "compressor": None if array.codec == "raw" else {"id": "zstd", "level": _ZARR_2_LEVEL},
        "dimension_separator": array.separator,
        "dtype": array.dtype.str if array.dtype.isbuiltin == 1 else array.dtype.name,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }


def _zarr_3(array: ZarrArray) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    index_codecs = [*codecs, {"name": "crc32c"}]
    if array.codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": _ZARR_3_LEVEL, "checksum": False}})
    if array.shard_shape is not None:
        inside = {"chunk_shape": list(array.chunk_shape), "codecs": codecs, "index_codecs": index_codecs}
        codecs = [{"name": "sharding_indexed", "configuration": inside}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.value_shape)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "fill_value": _fill_value(array),
    }


def _fill_value(array: ZarrArray) -> Any:
    if array.dtype.kind in "bc":
        return False if array.dtype.kind == "b" else [0.0, 0.0]
    zero = float(array.dtype.type(0))
    return "NaN" if math.isnan(zero) else 0 if "int" in array.dtype.name else zero


def zstd_level(array: ZarrArray) -> int:
    """The level that Orbax compresses with."""
    return _ZARR_2_LEVEL if array.driver == "zarr" else _ZARR_3_LEVEL


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
