"""What changed between Orbax releases and can be told from an item's files."""

from collections.abc import Mapping
from typing import Any

from orbaxkit.formats.zarr import ZarrArray

STORES_ALL_CHUNKS = "store_array_data_equal_to_fill_value"


def fills_missing_chunks(array: ZarrArray, settings: Mapping[str, Any]) -> bool:
    """Whether a chunk that is not there stands for zeros, as zarr 3 chunks did up to 0.9, or is damage."""
    return array.driver == "zarr3" and settings.get(STORES_ALL_CHUNKS) is not True


def writer_of(names: Mapping[str, bool], settings: Mapping[str, Any], has_write_shapes: bool) -> str:
    """The releases that write an item with these files, as far as they tell."""
    has_msgpack = names.get("checkpoint") is False
    if "commit_success.txt" in names and "use_ocdbt" in settings:
        return "orbax 0.12.3 or newer"
    if "use_ocdbt" in settings:
        return "orbax 0.11.31 or newer"
    if has_write_shapes:
        return "orbax 0.11.20 to 0.11.30"
    if "custom_metadata" in settings:
        return "orbax 0.11"
    if STORES_ALL_CHUNKS in settings:
        return "orbax 0.10"
    if "_METADATA" not in names:
        return "orbax 0.1 to 0.3" if has_msgpack else "orbax"
    if has_msgpack:
        return "orbax 0.3.5 to 0.5.15"
    return "orbax 0.5.16 to 0.9"
