"""Items that are one PRNG key: an array, and a JSON file that says whether it was a typed key."""

from dataclasses import replace

import numpy as np

from orbaxkit.formats.files import Folder
from orbaxkit.formats.items import ItemSource, Place
from orbaxkit.formats.orbax import open_item
from orbaxkit.specs import LeafSpec, Specs

# Orbax does not record the implementation here; its own restore takes JAX's default, which fits one width only.
_IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}


def open_random_key(folder: Folder, name: str) -> ItemSource:
    """Open a JaxRandomKey or NumpyRandomKey item, whose array or tree lies in the folder `name`."""
    settings = folder.read_json_optional(f"{name}_metadata/metadata")
    settings = settings if isinstance(settings, dict) else {}
    if name.startswith("np_"):
        source = open_item(folder.folder(name))
        containers = {"": "tuple"} if settings.get("legacy") is True else {}
        return replace(source, specs=Specs(source.specs.leaves, source.specs.paths, containers))
    source = open_item(folder.folder(name), is_one_array=True)
    return _typed(source) if settings.get("typed") is True else source


def _typed(source: ItemSource) -> ItemSource:
    (name, place), *others = source.places.items()
    spec = place.spec
    if others or spec.dtype != np.uint32 or not spec.shape or spec.shape[-1] not in _IMPLEMENTATIONS:
        return source
    return replace(
        source,
        specs=Specs.of([(source.specs.paths[name], _as_key(spec))]),
        places={name: Place(_as_key(spec), place.name, array=place.array)},
        notes=(*source.notes, "the key's implementation is not on disk: it follows from its width"),
    )


def _as_key(spec: LeafSpec) -> LeafSpec:
    return replace(
        spec,
        shape=spec.shape[:-1],
        stored_shape=spec.shape,
        kind="key",
        key_impl=_IMPLEMENTATIONS[spec.shape[-1]],
    )
