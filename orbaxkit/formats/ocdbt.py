"""OCDBT, the key-value store in most Orbax checkpoints: which arrays it holds and where each of their values lies.

A node gives its keys relative to the prefix that its subtree shares. Values up to about a kilobyte lie inside the
nodes, others in data files that nodes name by a folder (`ocdbt.process_0/`) and a name (`d/` and 32 digits).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import LFS_HEAD, LFS_HINT, LFS_PROBLEM, Folder, check_name, file_error, natural, pread
from orbaxkit.formats.ocdbt_nodes import MANIFEST_MAGIC, Child, Damaged, Leaf, Location, read_manifest, read_node
from orbaxkit.formats.zarr import METADATA_NAMES

MANIFEST = "manifest.ocdbt"
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
class Rows:
    """Neighbouring entries of a leaf node, all of one array. `before` is the key before them."""

    node: Leaf
    start: int
    stop: int
    before: bytes
    prefix: bytes  # of the node's keys
    part: str

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return int(self.node.lengths[self.start : self.stop].sum())

    def items(self) -> Iterator[tuple[str, Value]]:
        """Each whole key, and where its value lies."""
        keys = self.node.keys(self.start, self.stop, self.before)
        for row, key in zip(range(self.start, self.stop), keys, strict=True):
            yield _text(self.prefix + key), _value(self.node, row, self.part)


@dataclass(frozen=True, slots=True)
class Index:
    """The arrays of a store. `parts` is empty for a merged one; an unmerged one is the union of its parts."""

    folder: Folder
    parts: tuple[str, ...] = ()
    arrays: dict[str, tuple[str, Value]] = field(default_factory=dict)  # name -> (metadata file, its value)
    rows: dict[str, list[Rows]] = field(default_factory=dict)  # name -> its stored values

    def values(self, name: str) -> dict[str, Value]:
        """Where each stored value of an array lies, by its key."""
        skip = len(name) + 1 if name else 0
        return {key[skip:]: value for rows in self.rows.get(name, ()) for key, value in rows.items()}

    def nbytes(self, name: str) -> int:
        """The bytes of an array's stored values; parts may have the same one."""
        rows = self.rows.get(name, ())
        if len(rows) > 1 and self.parts:
            return sum(value.length for value in self.values(name).values())
        return sum(each.nbytes for each in rows)


def is_ocdbt(names: Iterable[str]) -> bool:
    """Whether a folder with these names holds an OCDBT store."""
    return any(name == MANIFEST or name.startswith(PART_PREFIX) for name in names)


def read_index(folder: Folder) -> Index:
    """Read a store's index: the merged tree where there is one, else every process's own."""
    if folder.has_file(MANIFEST):
        index, parts = Index(folder), [""]
        parts += _stores_below(folder, "", _NESTED_DEPTH)
        leaves = [(part, leaf) for part in parts for leaf in _read_tree(folder, part, is_inside=True)]
    else:
        names = natural(n for n, is_folder in folder.names().items() if is_folder and n.startswith(PART_PREFIX))
        found = [part for part in names if folder.has_file(f"{part}/{MANIFEST}")]
        if not found:
            raise CheckpointError(f"no {MANIFEST}, here or in {PART_PREFIX}*", where=folder.path)
        index = Index(folder, tuple(found))
        leaves = [(part, leaf) for part in found for leaf in _read_tree(folder, part, is_inside=False)]
    others = [rows for part, (prefix, leaf) in leaves for rows in _enter(index, leaf, prefix, part)]
    if any(_owner(name, index.arrays) is not None for name in index.arrays):  # an array inside another
        index.rows.clear()
        others = [Rows(leaf, 0, len(leaf), b"", prefix, part) for part, (prefix, leaf) in leaves]
    for rows in others:
        _enter_by_key(index, rows)
    return index


def _enter(index: Index, node: Leaf, prefix: bytes, part: str) -> Iterator[Rows]:
    """Enter a node's arrays: around an array's metadata lie its values. What lies around none comes back.

    Which rows they are is told by how much keys share, so that no key but the metadata's is made: that is right as long
    as no array lies inside another.
    """
    last, known, name = -1, b"", None
    for row, key in _metadata(node, prefix):
        owner, _, file = (prefix + key).rpartition(b"/")
        size = len(owner) + bool(owner) - len(prefix)
        below = np.flatnonzero(node.shared[last + 1 : row + 1] < size)
        begin = last + 1 + int(below[-1]) if len(below) else last + 1
        yield from _enter_after(index, Rows(node, last + 1, begin, known, prefix, part), name)
        _add(index, _text(owner), Rows(node, begin, row, key if begin > last + 1 else known, prefix, part))
        if _text(owner) not in index.arrays or file.decode() == METADATA_NAMES[0]:
            index.arrays[_text(owner)] = file.decode(), _value(node, row, part)
        last, known, name = row, key, owner
    yield from _enter_after(index, Rows(node, last + 1, len(node), known, prefix, part), name)


def _metadata(node: Leaf, prefix: bytes) -> Iterator[tuple[int, bytes]]:
    ends = [name.encode() for name in METADATA_NAMES]
    for row, key in node.keys_at(node.rows_ending_in(ends)):
        if (prefix + key).rpartition(b"/")[2] in ends:
            yield row, key


def _enter_after(index: Index, rows: Rows, name: bytes | None) -> Iterator[Rows]:
    """Of the rows after an array's metadata, those that are its own; the others come back."""
    stop = rows.start
    if name is not None:
        size = len(name) + bool(name) - len(rows.prefix)
        below = np.flatnonzero(rows.node.shared[rows.start : rows.stop] < size)
        stop = rows.start + int(below[0]) if len(below) else rows.stop
        _add(index, _text(name), replace(rows, stop=stop))
    if stop < rows.stop:
        *_, before = (rows.before, *rows.node.keys(rows.start, stop, rows.before))
        yield replace(rows, start=stop, before=before)


def _add(index: Index, name: str, rows: Rows) -> None:
    if rows.start < rows.stop:
        index.rows.setdefault(name, []).append(rows)


def _enter_by_key(index: Index, rows: Rows) -> None:
    """Enter rows one by one: an array that goes on in the next node, or that lies inside another."""
    before = rows.before
    for row, key in zip(range(rows.start, rows.stop), rows.node.keys(rows.start, rows.stop, before), strict=True):
        text = _text(rows.prefix + key)
        owner = None if text.rpartition("/")[2] in METADATA_NAMES else _owner(text, index.arrays)
        if owner is not None:
            _add(index, owner, replace(rows, start=row, stop=row + 1, before=before))
        before = key


def _owner(key: str, arrays: dict[str, tuple[str, Value]]) -> str | None:
    """The array that a key belongs to: the longest part of it, up to a `/`, that is one."""
    while "/" in key:
        key = key.rpartition("/")[0]
        if key in arrays:
            return key
    return "" if key and "" in arrays else None


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


def _read_tree(folder: Folder, part: str, *, is_inside: bool) -> Iterator[tuple[bytes, Leaf]]:
    """The leaves below the newest root, with the prefix of their keys; where stores lie inside, with the part's name.

    Each node is read once, and a child lies lower than its parent.
    """
    store = folder.folder(part)
    root = _read_root(store)
    start = f"{part}/".encode("utf-8", "surrogateescape") if part and is_inside else b""
    stack = [] if root is None else [(Child(root[0], start), root[1])]
    seen: set[Location] = set()
    while stack:
        (location, prefix), height = stack.pop()
        if location in seen:
            raise _damaged(store, "a node of the tree is used twice")
        seen.add(location)
        found, node = _read_node(store, location)
        if found != height:
            raise _damaged(store, "a node of the tree has the wrong height")
        if isinstance(node, Leaf):
            yield prefix, node
        else:
            below = [(child._replace(prefix=prefix + child.prefix), height - 1) for child in node]
            stack += reversed(below)


def _read_root(folder: Folder) -> tuple[Location, int] | None:
    data = folder.read(MANIFEST)
    if data[:4] != MANIFEST_MAGIC:
        raise file_error(folder.where(MANIFEST), f"is no OCDBT manifest: it starts with {data[:4].hex(' ')}")
    try:
        return read_manifest(data)
    except Damaged as error:
        raise _damaged(folder, str(error)) from None


def _read_node(folder: Folder, location: Location) -> tuple[int, list[Child] | Leaf]:
    """One node, after its name and its file were checked."""
    file, offset, length = location
    _check_extent(folder, check_name(file.name, folder.path), offset, length)
    with folder.open(file.name, (offset, length)) as opened:
        data = pread(opened, length, offset)
    try:
        height, node = read_node(data, file.base)
    except Damaged as error:
        raise _damaged(folder, str(error)) from None
    for each in node.files if isinstance(node, Leaf) else ():
        check_name(each.name, folder.path)
    return height, node


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


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _value(node: Leaf, row: int, part: str) -> Value:
    found = node.value(row)
    if isinstance(found, bytes):
        return Value(len(found), found, "", 0, part)
    return Value(found.length, None, f"{part}/{found.file.name}" if part else found.file.name, found.offset, part)


def short_reason(error: Exception) -> str:
    """The part of a TensorStore message that a person can use."""
    text = str(error).split("[tensorstore_spec")[0].split("[source locations")[0]
    return " ".join(text.split())[:200].rstrip(" ;:[") or type(error).__name__
