"""The small files beside an item's arrays, none of them required: `_sharding`, `_strings.json`, `array_metadatas`."""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, checked_sizes, natural, parse_json
from orbaxkit.specs import SavedSharding

SHARDING = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """What one process wrote of one array. `write_shape` is not the array's shape."""

    name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...] | None = None
    key_impl: str | None = None


def read_shardings(folder: Folder) -> dict[str, SavedSharding]:
    """`_sharding`: base64 of the stored name -> a JSON text."""
    found = folder.read_json_optional(SHARDING)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{SHARDING} is not a JSON object", where=folder.where(SHARDING))
    pairs = ((_decode_name(name), _sharding(text)) for name, text in found.items() if isinstance(text, str))
    return {name: sharding for name, sharding in pairs if name is not None and sharding is not None}


def _decode_name(text: str) -> str | None:
    try:
        return base64.b64decode(text, validate=False).decode("utf-8")
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def _sharding(text: str) -> SavedSharding | None:
    """One sharding; a kind that says nothing of mesh or device is None."""
    try:
        found = parse_json(text.encode("utf-8", "surrogatepass"), SHARDING)
        if found.get("sharding_type") == "SingleDeviceSharding":
            return SavedSharding(device=str(found["device_str"])[:200])
        if found.get("sharding_type") == "NamedSharding":
            return _named(found)
    except (CheckpointError, KeyError, TypeError, AttributeError):
        pass
    return None


def _named(found: Mapping[str, Any]) -> SavedSharding | None:
    names = tuple([str(name) for name in found["axis_names"]])
    shape = checked_sizes(found["shape"], SHARDING, "the mesh's shape")
    partition = tuple([_axes(part) for part in found["partition_spec"]])
    return SavedSharding(names, shape, partition) if len(names) == len(shape) else None


def _axes(part: Any) -> str | tuple[str, ...] | None:
    if part is None or isinstance(part, str):
        return part
    return tuple([str(name) for name in part])


def read_strings(folder: Folder, candidates: Iterable[str] = ("",)) -> dict[str, str]:
    """Strings by stored name, from `_strings.json` in the folder itself or in one of the folders named."""
    out: dict[str, str] = {}
    for inside in candidates:
        name = f"{inside}/{STRINGS}" if inside else STRINGS
        found = folder.read_json_optional(name)
        if found is None:
            continue
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise CheckpointError(f"{STRINGS} is not a JSON object of strings", where=folder.where(name))
        out |= found
    return out


def read_array_metadatas(folder: Folder, wanted: Iterable[str]) -> dict[str, ArrayMetadata] | None:
    """What processes wrote, by stored name; None where there is no such folder.

    Each process has a file of every array, so that one mostly has all that is wanted, and no more are read then.
    """
    if not folder.has_folder(ARRAY_METADATAS):
        return None
    inside = folder.folder(ARRAY_METADATAS)
    out: dict[str, ArrayMetadata] = {}
    missing = set(wanted)
    for name in natural(filter(is_process_file, inside.names())):
        out |= parse_array_metadatas(inside.read(name), inside.where(name))
        missing -= out.keys()
        if not missing:
            break
    return out


def is_process_file(name: str) -> bool:
    """Whether a name is that of one process's file: `process_0`."""
    return name.startswith("process_") and name.removeprefix("process_").isdecimal()


def parse_array_metadatas(data: bytes, where: str) -> dict[str, ArrayMetadata]:
    """One process's file."""
    found = parse_json(data, where)
    entries = found.get("array_metadatas") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise CheckpointError("the file holds no array_metadatas", where=where)
    out = [_array_metadata(entry, where) for entry in entries]
    return {entry.name: entry for entry in out}


def _array_metadata(entry: Any, where: str) -> ArrayMetadata:
    try:
        found = entry["array_metadata"]
        name, chunks, extra = found["param_name"], found.get("chunk_shape"), found.get("ext_metadata") or {}
        impl = extra.get("random_key_impl")
        if not isinstance(name, str) or "\0" in name:
            raise TypeError(name)
        return ArrayMetadata(
            name,
            checked_sizes(found["write_shape"], where, f"write_shape of {name}"),
            None if chunks is None else checked_sizes(chunks, where, f"chunk_shape of {name}"),
            impl if isinstance(impl, str) else None,
        )
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"array_metadatas has a malformed entry: {str(entry)[:120]}", where=where) from None
