"""The golden checkpoints and what was saved in them; reading leaves without jax; small checkpoints written by hand."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orbaxkit.formats import Source
from orbaxkit.specs import nest

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/expected.json"))
_EMPTY = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}


def copy_golden(case: str, to: Path) -> Path:
    """A golden case's checkpoint, copied so that it can be damaged."""
    (found,) = GOLDEN.joinpath(case).glob("ckpt*")
    return Path(shutil.copytree(found, to / found.name))


def expected_leaves(case: str) -> dict[str, dict[str, Any]]:
    """What was saved, by a name of each leaf; `bytes` are added where they are known."""
    leaves = json.loads((GOLDEN / case / "expected.json").read_text())["leaves"]
    values = GOLDEN / case / "expected.npz"
    arrays = np.load(values) if values.exists() else {}
    for leaf in leaves.values():
        if leaf.get("npz_key") in arrays:
            leaf["bytes"] = np.ascontiguousarray(arrays[leaf["npz_key"]]).tobytes()
    return leaves


def read_leaf(source: Source, name: str, index: tuple[slice, ...] | None = None) -> Any:
    """A leaf's value; keys as their uint32 data."""
    spec = source.specs[name]
    if spec.kind == "empty":
        return _EMPTY[str(spec.empty)]
    if spec.kind in ("scalar", "string"):
        return source.value(name)
    index = index or tuple(slice(0, size) for size in spec.data_shape)
    out = np.empty([part.stop - part.start for part in index], spec.dtype)
    source.read(name, index, out).result()
    return out


def read_tree(source: Source) -> Any:
    """All leaves, nested."""
    return nest([(path, read_leaf(source, name)) for name, path in source.specs.paths.items()], source.specs.containers)


def walk(tree: Any, path: Iterable[tuple[str, Any]]) -> Any:
    """Follow a path of `(kind of key, key)`."""
    for _, key in path:
        tree = tree[int(key)] if isinstance(tree, list | tuple) else tree[key if key in tree else str(key)]
    return tree


def same_bits(found: Any, leaf: Mapping[str, Any]) -> bool:
    """Whether an array has the bytes that were saved."""
    data = np.ascontiguousarray(found).tobytes()
    return data == leaf["bytes"] if "bytes" in leaf else hashlib.sha256(data).hexdigest() == leaf["sha256"]


def write_array(folder: Path, name: str, array: np.ndarray, **changes: Any) -> None:
    """One uncompressed zarr 2 array of one chunk."""
    inside = folder / name
    inside.mkdir(parents=True)
    meta = {
        "chunks": list(array.shape),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": array.dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    inside.joinpath(".zarray").write_text(json.dumps(meta | changes))
    inside.joinpath(".".join("0" * array.ndim) or "0").write_bytes(array.tobytes())


def entry(path: Iterable[str | int], value_type: str = "np.ndarray", **value: Any) -> dict[str, Any]:
    """One entry of `tree_metadata`."""
    keys = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path]
    return {"key_metadata": keys, "value_metadata": {"value_type": value_type, "skip_deserialize": False} | value}


def write_metadata(folder: Path, *entries: dict[str, Any], **settings: Any) -> None:
    """`_METADATA` of these entries."""
    tree = {str(i): found for i, found in enumerate(entries)}
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("_METADATA").write_text(json.dumps({"tree_metadata": tree, **settings}))


def write_tree(folder: Path, leaves: Mapping[tuple[str | int, ...], np.ndarray]) -> Path:
    """A whole plain item."""
    for path, array in leaves.items():
        write_array(folder, ".".join(map(str, path)), array)
    write_metadata(folder, *[entry(path) for path in leaves])
    return folder
