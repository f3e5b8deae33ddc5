"""Flax's own checkpoints: one msgpack file, `checkpoint_<step>`. Tuples and lists are dicts with keys "0", "1", …"""

from orbaxkit.formats.files import Folder
from orbaxkit.formats.items import ItemSource, Place
from orbaxkit.formats.msgpack import decode_file
from orbaxkit.formats.structure import Leaf, from_msgpack, in_tree_order
from orbaxkit.formats.values import inline_spec
from orbaxkit.specs import LeafSpec, Specs


def open_file(folder: Folder, name: str) -> ItemSource:
    """Open a msgpack file; arrays stay on disk until they are read."""
    leaves = in_tree_order(from_msgpack(decode_file(folder, name)).leaves)
    places = [_place(leaf) for leaf in leaves]
    specs = Specs.of([(leaf.path, place.spec) for leaf, place in zip(leaves, places, strict=True)])
    return ItemSource(folder, specs, dict(zip(specs.leaves, places, strict=True)), inline_file=name, writer="flax")


def _place(leaf: Leaf) -> Place:
    if leaf.is_skipped:
        return Place(LeafSpec(kind="empty", empty=leaf.value_type))
    if not leaf.is_inline:  # a placeholder: Orbax's structure file, away from its arrays
        return Place(LeafSpec(), problem=f"its array {leaf.name!r} is not in this file")
    return Place(inline_spec(leaf.inline, None), inline=leaf.inline)
