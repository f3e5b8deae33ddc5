"""OCDBT, the key-value store in most Orbax checkpoints: where each value lies, from TensorStore's public dump.

A node gives its keys relative to the prefix that its subtree shares. Values up to about a kilobyte lie inside the
nodes, others in data files that nodes name by a folder (`ocdbt.process_0/`) and a name (`d/` and 32 digits).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import LFS_HEAD, LFS_HINT, LFS_PROBLEM, Folder, check_name, file_error, natural

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
PART_PREFIX = "ocdbt.process_"  # process_0, process_replica_0, process_pwcontroller
_OWN_FOLDERS = ("array_metadatas",)
_NESTED_DEPTH = 8


UNKNOWN = -1


class Value(NamedTuple):
    """One stored value: its bytes where they are in the tree itself, else the file, offset and length."""

    length: int  # UNKNOWN of a file of its own in an object store, whose listings do not say it
    inline: bytes | None
    file: str  # relative to the folder; "" for inline values
    offset: int
    part: str  # the folder of the store that has it: "" for the item's own, else a process's, or that of a key with "/"


@dataclass(frozen=True, slots=True)
class Index:
    """Every key of a store. `parts` is empty for a merged one; an unmerged one is the union of its parts."""

    folder: Folder
    values: dict[str, Value]
    parts: tuple[str, ...] = ()


def is_ocdbt(names: Iterable[str]) -> bool:
    """Whether a folder with these names holds an OCDBT store."""
    return any(name == MANIFEST or name.startswith(PART_PREFIX) for name in names)


def read_index(folder: Folder) -> Index:
    """Read a store's index: the merged tree where there is one, else every process's own."""
    if folder.has_file(MANIFEST):
        values = dict(_read_tree(folder, ""))
        for inside in _stores_below(folder, "", _NESTED_DEPTH):
            values.update((f"{inside}/{key}", value) for key, value in _read_tree(folder.folder(inside), inside))
        return Index(folder, values)
    parts = natural(name for name, is_folder in folder.names().items() if is_folder and name.startswith(PART_PREFIX))
    found = [part for part in parts if folder.has_file(f"{part}/{MANIFEST}")]
    if not found:
        raise CheckpointError(f"no {MANIFEST}, here or in {PART_PREFIX}*", where=folder.path)
    values = {}
    for part in found:
        values.update(_read_tree(folder.folder(part), part))
    return Index(folder, values, tuple(found))


def _stores_below(folder: Folder, inside: str, depth: int) -> Iterator[str]:
    """Folders with a store of their own: release 0.3 took what is before a `/` in a key as the folder of a store."""
    for name, is_folder in folder.folder(inside).names().items():
        if is_folder and depth and name not in _OWN_FOLDERS and not name.startswith(PART_PREFIX):
            below = f"{inside}/{name}" if inside else name
            if folder.has_file(f"{below}/{MANIFEST}"):
                yield below
            yield from _stores_below(folder, below, depth - 1)


def read_values(folder: Folder, values: Iterable[Value]) -> list[bytes]:
    """The bytes of small values; each file is opened once."""
    values = list(values)
    out: list[bytes] = [value.inline or b"" for value in values]
    by_file: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        if value.inline is None:
            by_file.setdefault(value.file, []).append(i)
    for name, wanted in by_file.items():
        with folder.open(name) as file:
            for i in wanted:
                out[i] = _read_one(file, values[i], folder.where(name))
    return out


def _read_one(file: Any, value: Value, path: str) -> bytes:
    if value.length > 1 << 20:
        raise file_error(path, f"holds array metadata of {value.length:,} bytes")
    file.seek(value.offset)
    data = file.read(value.length)
    if len(data) != value.length:
        raise file_error(path, f"is cut short: a value ends at byte {value.offset + value.length:,}")
    return data


def _read_tree(folder: Folder, part: str) -> Iterator[tuple[str, Value]]:
    """Every key below the newest root. Each node is read once, and a child lies lower than its parent."""
    import tensorstore as ts

    _check_manifest(folder)
    base = ts.KvStore.open(folder.kvstore, context=ts.Context(folder.context)).result()
    stack = [(node, b"", height) for node, height in _newest_root(folder, base)]
    seen: set[str] = set()
    while stack:
        location, prefix, height = stack.pop()
        if location in seen:
            raise _damaged(folder, "a node of the tree is used twice")
        seen.add(location)
        node = _dump(folder, base, location)
        if node["height"] != height:
            raise _damaged(folder, "a node of the tree has the wrong height")
        if height == 0:
            yield from _leaf_entries(folder, node["entries"], prefix, part)
        else:
            below = [(e["location"], prefix + e["subtree_common_prefix"], height - 1) for e in node["entries"]]
            stack += reversed(below)


def _check_manifest(folder: Folder) -> None:
    if not folder.is_local:
        return  # a request of its own; TensorStore's reason will do
    head = folder.read(MANIFEST)[:4]
    if head != MANIFEST_MAGIC:
        raise file_error(folder.where(MANIFEST), f"is no OCDBT manifest: it starts with {head.hex(' ')}")


def _newest_root(folder: Folder, base: Any) -> list[tuple[str, int]]:
    manifest = _dump(folder, base, None)
    if not manifest.get("versions"):
        raise _damaged(folder, "it names no version, or is numbered")
    newest = manifest["versions"][-1]
    location = newest["root"].get("location")
    return [] if location is None else [(location, newest["root_height"])]


def _dump(folder: Folder, base: Any, location: str | None) -> dict[str, Any]:
    """One node, after its name and its file were checked; TensorStore's own errors become one short line."""
    import tensorstore as ts

    if location is None:
        pending = ts.ocdbt.dump(base)
    else:
        file, offset, length = parse_location(location, folder)
        _check_extent(folder, file, offset, length)
        pending = ts.ocdbt.dump(base, location)
    try:
        return pending.result()
    except Exception as error:
        raise _damaged(folder, short_reason(error)) from None


def _check_extent(folder: Folder, file: str, offset: int, length: int) -> None:
    problem = extent_problem(folder, file, offset + length)
    if problem:
        raise file_error(folder.where(file), problem, hint="the whole folder is needed: d/ and every ocdbt.process_*")


def extent_problem(folder: Folder, file: str, end: int) -> str | None:
    """Why the bytes of a file up to `end` are not there; no data is read."""
    size = folder.file_size(file)
    if size is None and not folder.has_file(file):
        return "is missing"
    if size is None or size >= end:
        return None
    with folder.open(file) as opened:
        if opened.read(len(LFS_HEAD)) == LFS_HEAD:
            return f"{LFS_PROBLEM} ({LFS_HINT})"
    return f"is cut short: it should reach byte {end:,} and has {size:,} bytes"


def _damaged(folder: Folder, reason: str) -> CheckpointError:
    return file_error(
        folder.where(MANIFEST), f"cannot be read: {reason}", hint="the save or the copy may be incomplete"
    )


def _leaf_entries(
    folder: Folder, entries: Iterable[dict[str, Any]], prefix: bytes, part: str
) -> Iterator[tuple[str, Value]]:
    inside = f"{part}/" if part else ""
    for entry in entries:
        key = (prefix + entry["key"]).decode("utf-8", "surrogateescape")
        inline = entry.get("inline_value")
        if inline is not None:
            yield key, Value(len(inline), inline, "", 0, part)
        else:
            file, offset, length = parse_location(entry["indirect_value"], folder)
            yield key, Value(length, None, inside + file, offset, part)


def parse_location(text: str, folder: Folder) -> tuple[str, int, int]:
    """`kind:folder:file:offset:length`, its names percent-encoded and not to be trusted."""
    try:
        _, base, name, offset, length = text.split(":")
        return _file_name(base, name, folder.path), int(offset), int(length)
    except ValueError:
        raise _damaged(folder, f"it names the place {text[:80]!r}") from None


@lru_cache(maxsize=4096)
def _file_name(base: str, name: str, where: str) -> str:
    return check_name(unquote(base) + unquote(name), where)


def short_reason(error: Exception) -> str:
    """The part of a TensorStore message that a person can use."""
    text = str(error).split("[tensorstore_spec")[0].split("[source locations")[0]
    return " ".join(text.split())[:200].rstrip(" ;:[") or type(error).__name__
