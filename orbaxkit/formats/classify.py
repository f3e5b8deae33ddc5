"""What a folder or a file of a run is: a tree item, a JSON item, a step, a root, or something inside an item."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder
from orbaxkit.formats.ocdbt import PART_PREFIX, is_ocdbt
from orbaxkit.formats.sidecars import ARRAY_METADATAS, is_process_file
from orbaxkit.formats.zarr import METADATA_NAMES

COMMIT = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
V1_MARKER = "orbax.checkpoint"
# Files that Orbax writes beside items; they are neither items nor strays.
OWN_NAMES = {STEP_METADATA, V1_MARKER, COMMIT, "descriptor"}

_UNFINISHED = re.compile(r"(.+?)\.(?:orbax-checkpoint-tmp(?:-[0-9]+)?|orbaxkit-(?:tmp|old)-[a-z]{8})")
_STEP = re.compile(r"(?:.*[_\-.])?([0-9]{1,18})")
_PROBED = 64  # folders looked into before one is said to hold no arrays


def finished_name(name: str) -> str | None:
    """The name that an unfinished save would have got, or None for any other name."""
    found = _UNFINISHED.fullmatch(name)
    return found[1] if found else None


def unfinished_in_store(folder: Folder, steps: Iterable[str]) -> set[str]:
    """Steps in an object store, which has no rename, that lack the file that others here were finished with."""
    steps = set(steps)
    finished = set() if folder.is_local else {name for name in steps if folder.has_file(f"{name}/{COMMIT}")}
    return steps - finished if finished else set()


def leftover_name(name: str) -> str | None:
    """The same for what an interrupted run of orbaxkit leaves beside its destination."""
    return finished_name(name) if ".orbaxkit-" in name else None


def step_of(name: str) -> int | None:
    """The step in `10`, `ckpt_00000002`, `step_000001`, `checkpoint_2`; None where a name ends in no number."""
    found = _STEP.fullmatch(finished_name(name) or name)
    return int(found[1]) if found else None


def is_tree(folder: Folder, names: Mapping[str, bool]) -> bool:
    """Whether a folder with these names holds a tree: its description, its arrays, or a PRNG key."""
    if "_METADATA" in names or names.get("checkpoint") is False or is_ocdbt(names):
        return True
    return is_array_metadatas(names) or random_key_name(names) is not None or _holds_arrays(folder, names)


def is_item(folder: Folder) -> bool:
    """Whether a folder that may not be there holds a tree."""
    return folder.kind() == "folder" and is_tree(folder, folder.names())


def _holds_arrays(folder: Folder, names: Mapping[str, bool]) -> bool:
    folders = [name for name, is_folder in names.items() if is_folder][:_PROBED]
    return any(folder.has_file(f"{name}/{file}") for name in folders for file in METADATA_NAMES)


def is_array_metadatas(names: Mapping[str, bool]) -> bool:
    """`process_N` files alone, or a folder that holds nothing but `array_metadatas`."""
    shown = [name for name in names if not name.startswith(".")]
    if shown and all(is_process_file(name) and not names[name] for name in shown):
        return True
    return shown == [ARRAY_METADATAS] and names[ARRAY_METADATAS]


def random_key_name(names: Mapping[str, bool]) -> str | None:
    """A key item holds `jax_random_key/` (or np_random_key) and `jax_random_key_metadata/`."""
    keys = [name for name, is_folder in names.items() if is_folder and name.endswith("random_key")]
    return next((name for name in keys if names.get(f"{name}_metadata")), None)


def is_json(names: Mapping[str, bool]) -> bool:
    """A JSON item: one file, `metadata` or `metrics`."""
    return any(names.get(name) is False for name in ("metadata", "metrics", "_ROOT_METADATA"))


def item_handlers(folder: Folder, names: Mapping[str, bool]) -> Any:
    """What `_CHECKPOINT_METADATA` says of the items: a dict in a step, a text in an item, None where nothing does."""
    if STEP_METADATA not in names:
        return None
    try:
        found = folder.read_json_optional(STEP_METADATA)
    except CheckpointError:
        return None
    return found.get("item_handlers") if isinstance(found, dict) else None


def tree_items(folder: Folder, names: Mapping[str, bool]) -> dict[str, str]:
    """The tree items of a step: name -> name of its folder. Unfinished ones have their tail cut off."""
    folders = [name for name, is_folder in names.items() if is_folder and not name.startswith(".")]
    found = [name for name in folders if is_tree(folder.folder(name), folder.folder(name).names())]
    return {finished_name(name) or name: name for name in found}


def is_step(folder: Folder, names: Mapping[str, bool]) -> bool:
    """Whether a folder is one step: Orbax says so, or it holds items."""
    folders = [folder.folder(name) for name, is_folder in names.items() if is_folder and name != "metadata"]
    if V1_MARKER in names or any(is_json(child.names()) for child in folders) or tree_items(folder, names):
        return True
    return isinstance(item_handlers(folder, names), dict)


def is_msgpack_map(folder: Folder, name: str) -> bool:
    """Whether a file begins as Flax's files do: with a msgpack map."""
    if not folder.has_file(name):
        return False
    with folder.open(name) as file:
        first = int.from_bytes(file.read(1))
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def enclosing_item(folder: Folder) -> Folder | None:
    """The item or key item that a folder lies inside, if any."""
    child = folder
    for _ in range(6 if folder.is_local else 0):  # above, each name in an object store is a request
        parent = child.parent
        if parent.path == child.path:
            return None
        if not parent.name.startswith(PART_PREFIX) and _is_inside(parent, child.name):
            return parent
        child = parent
    return None


def _is_inside(parent: Folder, name: str) -> bool:
    try:
        names = parent.names()
    except CheckpointError:
        return False
    key = random_key_name(names)
    if key is not None:
        return name in (key, f"{key}_metadata")
    if is_array_metadatas(names):
        return False
    return is_tree(parent, names)
