"""The tree of an Orbax item: from `_METADATA`, from a msgpack `checkpoint`, or from the names of the arrays alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, parse_json
from orbaxkit.formats.msgpack import Node
from orbaxkit.paths import KeyPath, Segment, format_path, is_index, natural_order

METADATA = "_METADATA"
PLACEHOLDER = "PLACEHOLDER://"
MAX_DEPTH = 200
EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")
_SEQUENCE_KEY = 1  # key_type: 1 is a sequence index, 2 anything else


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as the structure file describes it. `value_type` is None where it was not recorded."""

    path: KeyPath
    name: str  # of its array in the store
    value_type: str | None = None
    is_skipped: bool = False
    write_shape: tuple[int, ...] | None = None
    inline: Node = None  # its value, where the structure file holds it
    is_inline: bool = False


@dataclass(frozen=True)
class Structure:
    """All leaves, the containers that the file names, and its settings."""

    leaves: list[Leaf]
    containers: dict[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_write_shapes(self) -> bool:
        """Whether the writer recorded write shapes: such writers also record PRNG key types."""
        return any(leaf.write_shape is not None for leaf in self.leaves)


def read_metadata(folder: Folder) -> Structure | None:
    """The structure in `_METADATA`, or None where there is no such file."""
    meta = folder.read_json_optional(METADATA)
    if meta is None:
        return None
    where = folder.where(METADATA)
    tree = meta.get("tree_metadata") if isinstance(meta, dict) else None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{METADATA} holds no tree_metadata", where=where)
    settings = {key: value for key, value in meta.items() if key not in ("tree_metadata", "value_metadata_tree")}
    leaves = [_leaf(entry, where) for entry in tree.values()]
    return Structure(leaves, dict(_containers(meta.get("value_metadata_tree"), where)), settings)


def _leaf(entry: Any, where: str) -> Leaf:
    try:
        keys = entry["key_metadata"]
        path = tuple([_segment(key["key"], key.get("key_type")) for key in keys])
        value = entry.get("value_metadata") or {}
        shape = value.get("write_shape")
        return Leaf(
            path=path,
            name=".".join([str(segment) for segment in path]),
            value_type=_text_or_none(value.get("value_type")),
            is_skipped=value.get("skip_deserialize") is True,
            write_shape=None if shape is None else tuple([int(size) for size in shape]),
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{METADATA} has a malformed entry: {str(entry)[:120]}", where=where) from None


def _segment(key: Any, key_type: Any) -> Segment:
    if type(key) not in (str, int) or (isinstance(key, str) and "\0" in key):
        raise TypeError(key)
    text = str(key)
    return int(text) if key_type == _SEQUENCE_KEY and is_index(text) and len(text) < 10 else text


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _containers(text: Any, where: str) -> Iterator[tuple[str, str]]:
    """`value_metadata_tree` names tuples and NamedTuple classes; the names are shown and looked up, never imported."""
    if not isinstance(text, str):
        return
    stack: list[tuple[KeyPath, Any]] = [((), parse_json(text.encode("utf-8", "surrogatepass"), where))]
    while stack:
        path, node = stack.pop()
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{METADATA} is nested more than {MAX_DEPTH} levels deep", where=where)
        name, children = _container(node)
        if name:
            yield format_path(path), name
        stack += [((*path, key), child) for key, child in children]


def _container(node: Any) -> tuple[str | None, list[tuple[Segment, Any]]]:
    """What a node is called, if it has a name, and its children."""
    if isinstance(node, list):
        return None, list(enumerate(node))
    if not isinstance(node, dict):
        return None, []
    category, entries, clazz = node.get("category"), node.get("entries"), node.get("clazz")
    if category == "namedtuple" and isinstance(entries, list) and isinstance(clazz, str):
        named = [entry for entry in entries if isinstance(entry, dict) and "key" in entry]
        fields: list[tuple[Segment, Any]] = [(str(entry["key"]), entry.get("value")) for entry in named]
        return ".".join(part for part in (node.get("module"), clazz) if isinstance(part, str)), fields
    if category == "custom" and isinstance(clazz, str):
        is_tuple = clazz == "tuple" and isinstance(entries, list)
        return ("tuple", list(enumerate(entries))) if is_tuple and isinstance(entries, list) else (None, [])
    return None, list(node.items())


def from_msgpack(tree: Node) -> Structure:
    """The structure of a msgpack tree; strings that begin with PLACEHOLDER:// name an array in the store."""
    return Structure(list(_walk(tree, (), 0)))


def _walk(node: Node, path: KeyPath, depth: int) -> Iterator[Leaf]:
    if isinstance(node, dict | list) and node and depth < MAX_DEPTH:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _walk(child, (*path, key), depth + 1)
        return
    name = ".".join([str(segment) for segment in path])
    if isinstance(node, str) and node.startswith(PLACEHOLDER):
        yield Leaf(path, node.removeprefix(PLACEHOLDER))
    elif node is None or isinstance(node, dict | list):
        kind = "None" if node is None else "Dict" if isinstance(node, dict) else "List"
        yield Leaf(path, name, kind, is_skipped=True)
    else:
        yield Leaf(path, name, inline=node, is_inline=True)


def with_inline(structure: Structure, tree: Node) -> Structure:
    """The same structure, with the values that the msgpack tree holds."""
    return Structure([_with_inline(leaf, tree) for leaf in structure.leaves], structure.containers, structure.settings)


def _with_inline(leaf: Leaf, tree: Node) -> Leaf:
    node = tree
    for segment in leaf.path:
        if isinstance(node, dict):
            node = node.get(str(segment))
        elif isinstance(node, list) and str(segment).isdecimal() and int(segment) < len(node):
            node = node[int(segment)]
        else:
            return leaf
    if node is None or isinstance(node, dict | list) or (isinstance(node, str) and node.startswith(PLACEHOLDER)):
        return leaf
    return Leaf(leaf.path, leaf.name, leaf.value_type, leaf.is_skipped, leaf.write_shape, node, is_inline=True)


def from_names(names: Iterable[str]) -> Structure:
    """Stored names split at '.': a key that holds a dot cannot be told from two keys.

    A name that lies inside another (`a` and `a.b`) is kept whole, since an array holds no arrays.
    """
    known = set(names)
    return Structure([Leaf(_split_name(name, known), name) for name in sorted(known)])


def _split_name(name: str, known: set[str]) -> KeyPath:
    if not name:
        return ()
    at = name.find(".")
    while at >= 0:
        if name[:at] in known:
            return (name,)
        at = name.find(".", at + 1)
    return tuple(name.split("."))


def in_tree_order(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Leaves grouped by their parents, numeric keys among siblings in numeric order."""
    leaves = list(leaves)
    too_deep = [(format_path(leaf.path)[:200], "") for leaf in leaves if len(leaf.path) > MAX_DEPTH]
    if too_deep:
        raise CheckpointError(f"leaves are nested more than {MAX_DEPTH} levels deep", leaves=too_deep)
    if not any(is_index(str(segment)) for segment in {segment for leaf in leaves for segment in leaf.path}):
        return leaves
    root: dict[Segment, Any] = {}
    for leaf in leaves:
        node = root
        for segment in leaf.path:
            node = node.setdefault(segment, {})
        node.setdefault(_LEAVES, []).append(leaf)
    return list(_ordered(root))


_LEAVES: Any = object()  # the key of a node's own leaves; no segment equals it


def _ordered(node: dict[Any, Any]) -> Iterator[Leaf]:
    yield from node.pop(_LEAVES, ())
    for key in natural_order(node):
        yield from _ordered(node[key])
