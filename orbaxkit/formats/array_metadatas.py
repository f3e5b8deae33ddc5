"""`array_metadatas/process_N` without the checkpoint around it: names and write shapes, nothing to read."""

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, natural
from orbaxkit.formats.items import ItemSource, Place
from orbaxkit.formats.notes import name_warning
from orbaxkit.formats.sidecars import ArrayMetadata, is_process_file, parse_array_metadatas
from orbaxkit.formats.structure import from_names, in_tree_order
from orbaxkit.specs import LeafSpec, Specs

_PROBLEM = "its data is not here, only array_metadatas"


def open_files(folder: Folder, names: list[str]) -> ItemSource:
    """Open the `process_N` files among `names` as one tree."""
    found: dict[str, ArrayMetadata] = {}
    for name in filter(is_process_file, natural(names)):
        found |= parse_array_metadatas(folder.read(name), folder.where(name))
    if not found:
        raise CheckpointError("the array data is missing, and array_metadatas names none", where=folder.path)
    leaves = in_tree_order(from_names(found).leaves)
    specs = Specs.of([(leaf.path, _spec(found[leaf.name])) for leaf in leaves])
    places = {text: Place(spec, problem=_PROBLEM) for text, spec in specs.leaves.items()}
    return ItemSource(
        folder,
        specs,
        places,
        notes=("shapes are those of one process's write; dtypes are not on disk",),
        warnings=(name_warning("only array_metadatas is here"),),
        writer="orbax 0.11 or newer",
    )


def _spec(found: ArrayMetadata) -> LeafSpec:
    is_key = found.key_impl is not None and bool(found.write_shape)
    return LeafSpec(
        shape=found.write_shape[:-1] if is_key else found.write_shape,
        kind="key" if is_key else "array",
        chunk_shape=found.chunk_shape,
        stored_name=found.name,
        stored_shape=found.write_shape if is_key else None,
        key_impl=found.key_impl if is_key else None,
        is_write_shape=True,
    )
