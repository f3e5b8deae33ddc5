"""What is known of a checkpoint's leaves without reading their bytes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.paths import KeyPath, Segment, format_path, is_index, natural_order, nearest

Kind = Literal["array", "numpy", "scalar", "string", "key", "empty"]

# The closed list of dtypes a file may name.
DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "bfloat16",
        "int2",
        "int4",
        "uint2",
        "uint4",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
    ]
    if hasattr(ml_dtypes, name) or name in np.sctypeDict
}

# How JAX shows typed PRNG keys.
KEY_TAGS = {"threefry2x32": "fry", "rbg": "rbg", "unsafe_rbg": "urbg"}


@dataclass(frozen=True, slots=True)
class SavedSharding:
    """How a jax array lay on its devices when it was saved, as plain data."""

    axis_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    partition: tuple[str | tuple[str, ...] | None, ...] = ()
    device: str | None = None  # of a single-device array: "cuda:0"

    def __str__(self) -> str:
        if not self.axis_names:
            return self.device or "unknown"
        mesh = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.mesh_shape, strict=True))
        spec = ", ".join("+".join(p) if isinstance(p, tuple) else str(p) for p in self.partition)
        return f"P({spec}) on ({mesh})"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf: its global shape, dtype and kind, and how it lies on disk.

    Kinds: `array` (a jax array, or one whose type was not recorded), `numpy`, `scalar` (a Python or numpy number),
    `string`, `key` (typed PRNG keys: `shape` counts keys, `stored_shape` their uint32 data), `empty` (None, {}, [], …).

    >>> spec = ok.open("runs/pi0").specs["params/head/kernel"]
    >>> spec.shape, spec.nbytes, spec.kind
    ((8, 2), 32, 'array')
    """

    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    kind: Kind = "array"
    stored_bytes: int | None = None
    chunk_shape: tuple[int, ...] | None = None
    shard_shape: tuple[int, ...] | None = None  # zarr 3: the shape of one stored value, which holds several chunks
    sharding: SavedSharding | None = None
    stored_name: str | None = None
    stored_shape: tuple[int, ...] | None = None  # where it is not `shape`
    key_impl: str | None = None
    empty: str | None = None  # "None", "Dict", "List", "Tuple" or "NamedTuple"
    is_write_shape: bool = False  # the global shape is not on disk: `shape` is that of one process's write

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the stored array: `shape`, and for PRNG keys also the axis of their uint32 words."""
        return self.shape if self.stored_shape is None else self.stored_shape

    @property
    def size(self) -> int:
        """How many elements; strings and empty nodes have none."""
        return 0 if self.kind in ("string", "empty") else math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """Elements that count as parameters: those of arrays."""
        return self.size if self.kind in ("array", "numpy") else 0

    @property
    def nbytes(self) -> int:
        """Bytes once decoded; 0 where the dtype is unknown."""
        if self.dtype is None or self.kind in ("string", "empty"):
            return 0
        return math.prod(self.data_shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """`float32`, `key<fry>`, `str`, `None`, `?`: for people and for JSON."""
        if self.kind == "key":
            return f"key<{KEY_TAGS.get(self.key_impl or '', self.key_impl)}>"
        if self.kind in ("string", "empty"):
            return "str" if self.kind == "string" else str(self.empty)
        return "?" if self.dtype is None else self.dtype.name

    def __str__(self) -> str:
        if self.kind in ("string", "empty"):
            return self.dtype_name
        return f"{self.dtype_name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Specs(Mapping[str, LeafSpec]):
    """The leaves of a tree in order, by the text of their paths.

    `paths` gives each leaf's typed path; `containers` the types of inner nodes that the files name ("tuple", or the
    name of a NamedTuple class), by the text of the node's path.

    >>> specs = ok.open("runs/pi0").specs
    >>> specs.paths["opt_state/0/count"]
    ('opt_state', 0, 'count')
    """

    leaves: Mapping[str, LeafSpec]
    paths: Mapping[str, KeyPath]
    containers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(leaves: Iterable[tuple[KeyPath, LeafSpec]], containers: Mapping[str, str] | None = None) -> "Specs":
        """Build from typed paths; a leaf that lies inside another, or comes twice, is refused."""
        paths: dict[str, KeyPath] = {}
        specs: dict[str, LeafSpec] = {}
        for path, spec in leaves:
            text = format_path(path)
            if text in specs:
                raise CheckpointError("two leaves have one path", leaves=[(text, "comes twice")])
            paths[text], specs[text] = path, spec
        inner = {path[:i] for path in paths.values() for i in range(len(path))}
        nested = [(text, "is a leaf and has leaves inside") for text, path in paths.items() if path in inner]
        if nested:
            raise CheckpointError("a leaf lies inside another", leaves=nested)
        return Specs(specs, paths, containers or {})

    def __getitem__(self, text: str) -> LeafSpec:
        if text in self.leaves:
            return self.leaves[text]
        close = nearest(text, self.leaves)
        raise KeyError(f"no leaf {text!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def parameters(self) -> int:
        """The elements of all arrays."""
        return sum(spec.parameters for spec in self.leaves.values())

    @property
    def nbytes(self) -> int:
        """The decoded bytes of all leaves."""
        return sum(spec.nbytes for spec in self.leaves.values())

    def subset(self, names: Iterable[str]) -> "Specs":
        """The named leaves, in this order of names."""
        names = list(names)
        return Specs({n: self.leaves[n] for n in names}, {n: self.paths[n] for n in names}, self.containers)


def nest(leaves: Iterable[tuple[KeyPath, Any]], containers: Mapping[str, str] | None = None) -> Any:
    """Leaves to nested containers: mapping keys become dicts (numeric keys in numeric order), indices lists.

    Only what is on disk decides: a tuple comes back as a tuple only where `containers` says so, and a sequence of
    which some entries are missing is a dict by index, since a list would have to invent them.
    """
    root = _Node()
    for path, value in leaves:
        if not path:
            return value
        node = root
        for segment in path[:-1]:
            node = node.setdefault(node.key(segment), _Node())
        node[node.key(path[-1])] = value
    return _close(root, (), containers or {})


class _Node(dict):
    """An inner node while nesting: told apart from a leaf whose value is a dict."""

    def key(self, segment: Segment) -> Segment:
        """An index and a key of the same text are one place: the one that came first."""
        if segment in self:
            return segment
        if isinstance(segment, int):
            return str(segment) if str(segment) in self else segment
        return int(segment) if is_index(segment) and len(segment) < 19 and int(segment) in self else segment


def _close(node: dict, path: KeyPath, containers: Mapping[str, str]) -> Any:
    children = {
        key: _close(node[key], (*path, key), containers) if isinstance(node[key], _Node) else node[key]
        for key in natural_order(node)
    }
    if not children or list(children) != list(range(len(children))):
        return children
    kind = tuple if containers and containers.get(format_path(path)) == "tuple" else list
    return kind(children.values())


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two trees disagree, each as `(path, found, wanted)`; None on the side that lacks the leaf."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape: tuple[tuple[str, LeafSpec, LeafSpec], ...] = ()
    dtype: tuple[tuple[str, LeafSpec, LeafSpec], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shape or self.dtype)


def compare(found: Specs, wanted: Specs) -> Difference:
    """Compare two trees leaf by leaf: structure, then shapes, then dtypes (and PRNG implementations)."""
    both = [name for name in wanted if name in found.leaves]
    pairs = [(name, found.leaves[name], wanted.leaves[name]) for name in both]
    return Difference(
        missing=tuple(name for name in wanted if name not in found.leaves),
        unexpected=tuple(name for name in found if name not in wanted.leaves),
        shape=tuple(pair for pair in pairs if pair[1].shape != pair[2].shape),
        dtype=tuple(pair for pair in pairs if pair[1].dtype_name != pair[2].dtype_name),
    )
