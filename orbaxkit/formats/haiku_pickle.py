"""Haiku params in a pickle, plain dict or FlatMapping, read without running anything of what the pickle names.

Source: dm-haiku's `data_structures.py`, numpy's and jax's `__reduce__`. Only the few names below are admitted, each as
a stand-in of ours that keeps its arguments: an array is made of its shape, dtype and bytes, and nothing else is called.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Done, Pending, Value
from orbaxkit.formats.files import Folder
from orbaxkit.paths import KeyPath
from orbaxkit.specs import DTYPES, LeafSpec, Specs

SUFFIXES = (".pickle", ".pkl", ".pystate")

# Far beyond any model; a pickle that refers to one dict many times can spell out more than a machine holds.
_MAX_LEAVES, _MAX_DEPTH = 1_000_000, 64
# What all leaves together may take for each byte of the file: what is shared is in it once.
_MOST_SHARED = 4
_PUTTING = {"PUT", "BINPUT", "LONG_BINPUT"}
_BUILDING = {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ", "NEWOBJ_EX"}


class Refused(ValueError):
    """The pickle holds what no params need."""


@dataclass
class _Dtype:
    """A dtype by name; what `__setstate__` would set is its byte order."""

    name: Any
    order: str = "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or any(part is not None for part in state[2:5]):
            raise Refused("a dtype with fields")
        self.order = str(state[1])

    def made(self) -> np.dtype:
        """The dtype, out of the closed list."""
        try:
            dtype = np.dtype(self.name) if isinstance(self.name, str) else None
        except TypeError:
            dtype = DTYPES.get(str(self.name))
        if dtype is None or dtype.hasobject or dtype.name not in DTYPES:
            raise Refused(f"an array of dtype {self.name!r}")
        return DTYPES[dtype.name].newbyteorder(">" if self.order == ">" else "<")


@dataclass
class _Array:
    """An array being rebuilt: its state is (version, shape, dtype, is Fortran order, bytes)."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def made(self) -> np.ndarray:
        """The array, of native byte order."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise Refused("an array without its parts")
        _, shape, dtype, is_fortran, data = self.state
        return _array(data, dtype, shape, "F" if is_fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, bytearray)):
        raise Refused("an array that is not made of bytes")
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise Refused(f"an array of shape {shape!r}"[:80])
    made = dtype.made()
    flat = np.frombuffer(data, made)
    if flat.size != int(np.prod(shape, dtype=object)):
        raise Refused(f"an array of shape {list(shape)} with {flat.size:,} values")
    return flat.reshape(shape, order="F" if order == "F" else "C").astype(made.newbyteorder("="), copy=False)


def _mapping(*args: Any) -> Mapping[Any, Any]:
    if len(args) > 1 or not all(isinstance(arg, Mapping) for arg in args):
        raise Refused("a FlatMapping that is none of a dict")
    return args[0] if args else {}


def _encoded(text: Any, encoding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise Refused("text in an unknown encoding")
    return text.encode(encoding)


def _no_bytes(*args: Any) -> bytes:
    """How old protocols write `b""`."""
    if args:
        raise Refused("bytes that are made by a call")
    return b""


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    return dict(pairs)


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    return _Array((0, shape, dtype, order == "F", data))


def _jax_array(rebuild: Any, args: Any, state: Any, aval: Any) -> _Array:
    return _Array(state)


def _scalar(dtype: Any, data: Any) -> np.ndarray:
    return _array(data, dtype, (), "C")


_MULTIARRAY: dict[str, Callable[..., Any]] = {"_reconstruct": lambda *args: _Array(), "scalar": _scalar}
_ADMITTED: Mapping[tuple[str, str], Any] = {
    ("haiku._src.data_structures", "FlatMapping"): _mapping,
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _encoded,
    ("__builtin__", "bytes"): _no_bytes,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): lambda name, *_: _Dtype(name),
    ("jax._src.array", "_reconstruct_array"): _jax_array,
    **{(f"numpy.{core}.multiarray", name): made for core in ("core", "_core") for name, made in _MULTIARRAY.items()},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
    **{("ml_dtypes", name): name for name in DTYPES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """One of the admitted names."""
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        raise Refused(f"{module}.{name}, which is code")

    def persistent_load(self, pid: Any) -> Any:
        """Nothing outside the file."""
        raise Refused("a reference to something outside")


@dataclass(frozen=True)
class PickleSource:
    """A `Source` over arrays that were unpickled whole."""

    specs: Specs
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = "Haiku"

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Copy a region."""
        out[...] = self.values[name][(*index, ...)]
        return Done()

    def value(self, name: str) -> Value:
        """A number or a string."""
        found: Value = self.values[name]
        return found

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """None: what was unpickled is whole."""
        return []


def open_pickle(folder: Folder, name: str) -> PickleSource:
    """The params in a pickle. Raises CheckpointError: it holds anything else, which is named and was not run."""
    path, data = folder.where(name), folder.read(name)
    try:
        _look_over(data)
        tree = _Unpickler(io.BytesIO(data)).load()
        leaves = list(_leaves(tree, _MOST_SHARED * len(data) + (1 << 20)))
    except Refused as error:
        hint = "only params are read: nested dicts (or Haiku's FlatMapping) of arrays, numbers and strings"
        raise CheckpointError(f"this pickle holds {error}; nothing of it was run", where=path, hint=hint) from None
    except Exception as error:  # whatever malformed bytes make of the unpickler
        raise CheckpointError(f"the pickle is damaged: {type(error).__name__}: {error}", where=path) from None
    if all(path == () for path, _ in leaves) and not isinstance(leaves[0][1], np.ndarray):
        raise CheckpointError("the pickle holds no params", where=path)
    specs = Specs.of([(where, _spec(value)) for where, value in leaves])
    return PickleSource(specs, dict(zip(specs.leaves, (value for _, value in leaves), strict=True)))


def _look_over(data: bytes) -> None:
    """Read every instruction once without running it: lengths that lie, and instructions that no params need."""
    at = 0
    for done, (operation, argument, position) in enumerate(pickletools.genops(data)):
        if operation.name in _BUILDING:
            raise Refused(f"the instruction {operation.name}")
        if operation.name in _PUTTING and (argument or 0) > done:  # the unpickler makes room for all places before it
            raise Refused(f"a memo with a place {argument:,}")
        at = position or at
    if data[at + 1 :]:
        raise Refused("more after its end")


def _leaves(tree: Any, most_bytes: int) -> Iterator[tuple[KeyPath, Any]]:
    """Arrays, numbers and strings with their paths, in order; together they are no larger than the file allows."""
    pending: list[tuple[KeyPath, Any]] = [((), tree)]
    count = taken = 0
    while pending:
        path, node = pending.pop()
        if isinstance(node, _Array):
            node = node.made()
        if isinstance(node, Mapping) and node:
            if len(path) >= _MAX_DEPTH:
                raise Refused(f"dicts more than {_MAX_DEPTH} deep")
            bad = next((key for key in node if not isinstance(key, (str, int))), None)
            if bad is not None:
                raise Refused(f"a key of type {type(bad).__name__}")
            pending += [((*path, key if isinstance(key, str) else str(key)), node[key]) for key in reversed(list(node))]
            continue
        if isinstance(node, (list, tuple)) and node:
            pending += [((*path, i), node[i]) for i in reversed(range(len(node)))]
            if len(path) >= _MAX_DEPTH:
                raise Refused(f"lists more than {_MAX_DEPTH} deep")
            continue
        count += 1
        if count > _MAX_LEAVES:
            raise Refused(f"more than {_MAX_LEAVES:,} leaves")
        if not isinstance(node, (np.ndarray, bool, int, float, complex, str, dict, list, tuple, type(None))):
            raise Refused(f"a {type(node).__name__.lstrip('_')}")
        taken += node.nbytes if isinstance(node, np.ndarray) else len(node) if isinstance(node, str) else 0
        if taken > most_bytes:
            raise Refused("values that are far larger than the file")
        yield path, node


def _spec(value: Any) -> LeafSpec:
    if isinstance(value, np.ndarray):
        return LeafSpec(value.shape, value.dtype, stored_bytes=value.nbytes, chunk_shape=value.shape)
    if isinstance(value, str):
        return LeafSpec(kind="string", stored_bytes=len(value.encode("utf-8", "surrogatepass")))
    if value is None or not isinstance(value, (bool, int, float, complex)):
        return LeafSpec(kind="empty", empty="None" if value is None else type(value).__name__.capitalize())
    dtype = np.asarray(value).dtype
    return LeafSpec((), dtype, "scalar", dtype.itemsize)
