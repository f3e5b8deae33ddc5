"""What a stored value is: its kind, and scalars as Python or numpy numbers."""

from typing import Any

import numpy as np

from orbaxkit.formats import Value
from orbaxkit.formats.msgpack import Node, StoredArray
from orbaxkit.formats.sidecars import ArrayMetadata
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.specs import Kind, LeafSpec, SavedSharding

_WIDE = tuple(np.dtype(name) for name in ("int64", "uint64", "float64"))
# How Python's own numbers are stored.
_PYTHON = (*(np.dtype(name) for name in ("int64", "float64", "bool", "complex128")), np.dtype("uint64"))


def kind_of(value_type: str | None, shape: tuple[int, ...], dtype: np.dtype) -> Kind:
    """What was saved. Where no type was recorded, a 64-bit number without axes was one of Python's."""
    if value_type == "scalar":
        return "numpy" if shape else "scalar"
    if value_type == "np.ndarray":
        return "numpy"
    return "scalar" if value_type is None and not shape and dtype in _WIDE else "array"


def may_be_key(value_type: str | None, array: ZarrArray) -> bool:
    """Whether an array may hold the data of typed PRNG keys, which its metadata would tell."""
    return array.dtype == np.uint32 and bool(array.shape) and kind_of(value_type, array.shape, array.dtype) == "array"


def array_spec(
    value_type: str | None,
    name: str,
    array: ZarrArray,
    stored_bytes: int | None,
    sharding: SavedSharding | None,
    metadata: ArrayMetadata | None,
) -> LeafSpec:
    """The spec of an array in the store; of PRNG keys where their implementation was recorded."""
    impl = metadata.key_impl if metadata else None
    is_key = impl is not None and may_be_key(value_type, array)
    return LeafSpec(
        shape=array.shape[:-1] if is_key else array.shape,
        dtype=array.dtype,
        kind="key" if is_key else kind_of(value_type, array.shape, array.dtype),
        stored_bytes=stored_bytes,
        chunk_shape=array.chunk_shape,
        shard_shape=array.shard_shape,
        sharding=sharding,
        stored_name=name,
        stored_shape=array.shape if is_key else None,
        key_impl=impl if is_key else None,
    )


def inline_spec(node: Node, value_type: str | None) -> LeafSpec:
    """The spec of a value inside a msgpack file; bytes show as an array of uint8."""
    if isinstance(node, StoredArray):
        kind = kind_of(value_type, node.shape, node.dtype)
        return LeafSpec(node.shape, node.dtype, kind, node.nbytes, chunk_shape=node.shape)
    if isinstance(node, bytes):
        return LeafSpec((len(node),), np.dtype("uint8"), "numpy", len(node), chunk_shape=(len(node),))
    if isinstance(node, str):
        return LeafSpec(kind="string", stored_bytes=len(node.encode("utf-8", "surrogatepass")))
    dtype = _scalar_dtype(node)
    return LeafSpec(dtype=dtype, kind="scalar", stored_bytes=dtype.itemsize)


def _scalar_dtype(node: Any) -> np.dtype:
    if isinstance(node, np.generic):
        return node.dtype
    if isinstance(node, int) and node > np.iinfo(np.int64).max:
        return np.dtype("uint64")
    return np.dtype({bool: "bool", int: "int64", float: "float64", complex: "complex128"}[type(node)])


def scalar_value(data: np.ndarray) -> Value:
    """An array without axes as the Python number that is stored so, else as a numpy scalar."""
    return data.item() if data.dtype in _PYTHON else data.reshape(1)[0]
