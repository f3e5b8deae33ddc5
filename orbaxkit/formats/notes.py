"""What a person should know of an opened item: notes on how it was saved, warnings on what had to be assumed."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from orbaxkit.errors import shorten
from orbaxkit.formats.items import Place
from orbaxkit.formats.sidecars import ARRAY_METADATAS, ArrayMetadata
from orbaxkit.formats.stores import ArrayStore, OcdbtStore
from orbaxkit.specs import SavedSharding, Specs

AMBIGUOUS = "names joined by '.' are ambiguous: a key that holds a dot looks like two keys"
_KEY_WORDS = (2, 4)  # uint32 words of a threefry key and of an rbg key


def mesh_notes(specs: Specs) -> list[str]:
    """`saved on a 2x4 mesh (data, model) of 8 devices`, `saved on cuda:0`: the most frequent first."""
    found = Counter(_place(spec.sharding) for spec in specs.leaves.values() if spec.sharding is not None)
    return [f"saved on {place}" for place, _ in found.most_common(3)]


def _place(sharding: SavedSharding) -> str:
    if not sharding.axis_names:
        return sharding.device or "an unknown device"
    sizes, count = "x".join(map(str, sharding.mesh_shape)), int(np.prod(sharding.mesh_shape, dtype=object))
    return f"a {sizes} mesh ({', '.join(sharding.axis_names)}) of {count} device{'s' * (count != 1)}"


def store_notes(store: ArrayStore) -> list[str]:
    """Parts that were never merged."""
    parts = store.parts if isinstance(store, OcdbtStore) else ()
    if not parts:
        return []
    return [f"the parts of {len(parts)} processes were never merged: read as their union ({', '.join(shorten(parts))})"]


def missing_notes(places: Mapping[str, Place]) -> list[str]:
    """Leaves that the description names and nothing stores."""
    lost = [name for name, place in places.items() if place.problem]
    return [f"{len(lost)} leaves have no data: {', '.join(shorten(lost))}"] if lost else []


def name_warning(what: str) -> str:
    """For trees made from stored names."""
    return f"{what}, so paths were made from stored names; {AMBIGUOUS}"


def key_warnings(specs: Specs, has_write_shapes: bool, metadatas: Mapping[str, ArrayMetadata] | None) -> list[str]:
    """Releases that record write shapes record key types in `array_metadatas`; without it, keys look like uint32."""
    known = metadatas or {}
    doubtful = [
        name
        for name, spec in specs.leaves.items()
        if spec.kind == "array" and spec.dtype == np.uint32 and spec.shape[-1:] and spec.shape[-1] in _KEY_WORDS
        if spec.stored_name is not None and spec.stored_name not in known
    ]
    if not (has_write_shapes and doubtful):
        return []
    names = ", ".join(shorten(doubtful))
    return [
        f"{ARRAY_METADATAS} does not cover {names}: uint32 arrays here may be typed PRNG keys, which cannot be known"
    ]
