"""Open one Orbax item, a tree of arrays, strings and empty nodes, by whichever release. Files decide, not versions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.eras import writer_of
from orbaxkit.formats.files import Folder
from orbaxkit.formats.items import ItemSource, Place
from orbaxkit.formats.msgpack import decode_file
from orbaxkit.formats.notes import key_warnings, mesh_notes, missing_notes, name_warning, store_notes
from orbaxkit.formats.sidecars import (
    ARRAY_METADATAS,
    SHARDING,
    STRINGS,
    ArrayMetadata,
    read_array_metadatas,
    read_shardings,
    read_strings,
)
from orbaxkit.formats.stores import ArrayStore, check_stored_name, open_store
from orbaxkit.formats.structure import (
    EMPTY_TYPES,
    METADATA,
    Leaf,
    Structure,
    from_msgpack,
    from_names,
    in_tree_order,
    read_metadata,
    with_inline,
)
from orbaxkit.formats.values import array_spec, inline_spec, may_be_key
from orbaxkit.formats.zarr import ZarrArray, parse
from orbaxkit.specs import LeafSpec, SavedSharding, Specs

CHECKPOINT = "checkpoint"
T = TypeVar("T")


@dataclass(frozen=True)
class _Contents:
    """Everything of an item's folder that leaves are resolved against, by stored name."""

    store: ArrayStore
    arrays: dict[str, ZarrArray]
    strings: dict[str, str]
    shardings: dict[str, SavedSharding]
    metadatas: dict[str, ArrayMetadata] | None
    notes: tuple[str, ...]


def open_item(folder: Folder, *, is_one_array: bool = False) -> ItemSource:
    """Open an item's folder; `is_one_array` where an only leaf called `checkpoint` is the item itself."""
    names = folder.names()
    store = open_store(folder, names)
    structure = _structure(folder, names, store)
    is_one_array = is_one_array and [leaf.name for leaf in structure.leaves] == [CHECKPOINT]
    if is_one_array:
        structure = replace(structure, leaves=[replace(structure.leaves[0], path=())])
    leaves = in_tree_order(structure.leaves)
    contents = _contents(folder, names, leaves, store)
    found = [_place(leaf, contents) for leaf in leaves]
    specs = Specs.of([(leaf.path, place.spec) for leaf, place in zip(leaves, found, strict=True)], structure.containers)
    places = dict(zip(specs.leaves, found, strict=True))
    _check_any(folder, places)
    has_structure = METADATA in names or names.get(CHECKPOINT) is False
    return ItemSource(
        folder=folder,
        specs=specs,
        places=places,
        store=store,
        settings=structure.settings,
        notes=(*contents.notes, *mesh_notes(specs), *store_notes(store), *missing_notes(places)),
        warnings=(
            *([] if has_structure or is_one_array else [name_warning(f"there is no {METADATA}")]),
            *key_warnings(specs, structure.has_write_shapes, contents.metadatas),
        ),
        writer=writer_of(names, structure.settings, structure.has_write_shapes),
    )


def _structure(folder: Folder, names: dict[str, bool], store: ArrayStore) -> Structure:
    """A folder called `checkpoint` is an array, not a structure file."""
    found = read_metadata(folder)
    if names.get(CHECKPOINT) is not False:
        return found or from_names([*store.names(), *read_strings(folder)])
    tree = decode_file(folder, CHECKPOINT)
    return from_msgpack(tree) if found is None else with_inline(found, tree)


def _is_empty(leaf: Leaf) -> bool:
    """Skipped leaves are not always empty: a value inside the msgpack file is marked so too."""
    return leaf.is_skipped and leaf.value_type in EMPTY_TYPES and not leaf.is_inline


def _contents(folder: Folder, names: dict[str, bool], leaves: Iterable[Leaf], store: ArrayStore) -> _Contents:
    stored = [leaf for leaf in leaves if not (leaf.is_inline or _is_empty(leaf))]
    where = folder.where(METADATA)
    wanted = dict.fromkeys([check_stored_name(leaf.name, leaf.path, where) for leaf in stored])
    found = store.metadata(wanted)
    arrays = {name: parse(file, data, f"{store.where(name)} ({name})") for name, file, data in found}
    keys = [leaf.name for leaf in stored if leaf.name in arrays and may_be_key(leaf.value_type, arrays[leaf.name])]
    notes: list[str] = []
    return _Contents(
        store=store,
        arrays=arrays,
        strings=_strings(folder, names, [name for name in wanted if name not in arrays]),
        shardings=_optional(folder, read_shardings, SHARDING, notes) or {},
        metadatas=_optional(folder, lambda f: read_array_metadatas(f, keys), ARRAY_METADATAS, notes),
        notes=tuple(notes),
    )


def _strings(folder: Folder, names: dict[str, bool], lost: list[str]) -> dict[str, str]:
    """From the item's own file; 0.3 put all strings into the folder of the first."""
    if STRINGS in names:
        return read_strings(folder)
    return read_strings(folder, [name for name in lost if name and folder.has_folder(name)])


def _optional(folder: Folder, read: Callable[[Folder], T], name: str, notes: list[str]) -> T | None:
    """Read a file that nothing needs: one that is broken becomes a note."""
    try:
        return read(folder)
    except CheckpointError as error:
        notes.append(f"{name} is ignored: {str(error).splitlines()[0]}")
        return None


def _place(leaf: Leaf, contents: _Contents) -> Place:
    """The one order of the places where a value can lie."""
    name = leaf.name
    if _is_empty(leaf):
        return Place(LeafSpec(kind="empty", empty=leaf.value_type, stored_name=name))
    if leaf.is_inline:
        return Place(inline_spec(leaf.inline, leaf.value_type), inline=leaf.inline)
    if name in contents.arrays:
        return Place(_array_spec(leaf, contents), name, array=contents.arrays[name])
    if name in contents.strings:
        text = contents.strings[name]
        size = len(text.encode("utf-8", "surrogatepass"))
        return Place(LeafSpec(kind="string", stored_bytes=size, stored_name=name), text=text)
    return _lost(leaf)


def _array_spec(leaf: Leaf, contents: _Contents) -> LeafSpec:
    name = leaf.name
    return array_spec(
        leaf.value_type,
        name,
        contents.arrays[name],
        contents.store.stored_bytes(name),
        contents.shardings.get(name),
        (contents.metadatas or {}).get(name),
    )


def _lost(leaf: Leaf) -> Place:
    is_string = leaf.value_type == "string"
    spec = LeafSpec(
        shape=() if is_string else leaf.write_shape or (),
        kind="string" if is_string else "array",
        stored_name=leaf.name,
        is_write_shape=not is_string,
    )
    return Place(spec, problem=f"nothing is stored under its name {leaf.name!r}")


def _check_any(folder: Folder, places: dict[str, Place]) -> None:
    """Refuse an item of which only the description is there."""
    lost = [(name, place.problem) for name, place in places.items() if place.problem]
    if lost and len(lost) == sum(place.spec.kind != "empty" for place in places.values()):
        raise CheckpointError(
            "the array data is missing: only the description of the tree is here",
            leaves=lost,
            where=folder.path,
            hint="copy the whole folder: manifest.ocdbt, d/ and every ocdbt.process_*, or one folder per array",
        )
