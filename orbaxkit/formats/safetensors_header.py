"""The header of a safetensors file: JSON that says of each tensor its dtype, shape and place in the file."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, check_not_lfs, checked_sizes, file_error, parse_json
from orbaxkit.specs import DTYPES

METADATA = "__metadata__"
# The library's own limit.
MAX_HEADER_BYTES = 100_000_000

# The closed list of dtypes; those of less than a byte are packed, which no array here is.
NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_SURROGATES = re.compile("[\ud800-\udfff]")
_DTYPES = {stored: DTYPES[name] for name, stored in NAMES.items() if name in DTYPES}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor and where its bytes lie."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int = 0  # in the file
    problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of the data."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_header(folder: Folder, name: str) -> Header:
    """Read and check a file's header; a file that ends too soon makes problems of the tensors beyond its end."""
    where = folder.where(name)
    size = folder.file_size(name)
    with folder.open(name) as file:
        head = file.read(256)
        check_not_lfs(head, where)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or length > MAX_HEADER_BYTES or length < 2 or head[8:9] != b"{":
            raise file_error(where, "is no safetensors file: it does not begin with a header")
        if size is not None and size < 8 + length:
            raise file_error(where, f"is cut short: its header ends at byte {8 + length:,} of {size:,}")
        file.seek(8)
        found = parse_json(file.read(length), where)
    metadata = found.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{METADATA} is not a JSON object of strings", where=where)
    tensors = {key: _tensor(key, entry, name, 8 + length, size, where) for key, entry in found.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    _check_layout(ordered, 8 + length, size, where)
    return Header(ordered, metadata)


def _tensor(key: str, entry: Any, file: str, base: int, size: int | None, where: str) -> Tensor:
    try:
        start, end = checked_sizes(entry["data_offsets"], where, f"data_offsets of {key[:80]!r}")
        shape = checked_sizes(entry["shape"], where, f"the shape of {key[:80]!r}")
        dtype = _DTYPES.get(entry["dtype"])
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(
            f"the header has a malformed entry: {key[:80]!r}: {str(entry)[:80]}", where=where
        ) from None
    problem = name_problem(key)
    if problem:
        raise CheckpointError(f"a tensor's name {problem}: {key[:80]!r}", where=where)
    if dtype is None:
        raise CheckpointError(
            f"{key[:80]!r} has a dtype that is not known here: {str(entry['dtype'])[:40]}", where=where
        )
    if end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{key[:80]!r} has {end - start:,} bytes for {dtype.name}{list(shape)}", where=where)
    if math.prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:  # numpy makes no such array, not even an empty one
        raise CheckpointError(f"{key[:80]!r} has a shape that no array has: {list(shape)}", where=where)
    short = None
    if size is not None and base + end > size:
        short = f"{file} is cut short: it should reach byte {base + end:,} and has {size:,}"
    return Tensor(file, dtype, shape, base + start, short)


def name_problem(name: str) -> str | None:
    """Why a text cannot name a tensor: the library reads no lone surrogates, and no path here holds NUL."""
    if "\0" in name:
        return "holds NUL"
    return "is no Unicode text" if _SURROGATES.search(name) else None


def _check_layout(tensors: Mapping[str, Tensor], base: int, size: int | None, where: str) -> None:
    """No two tensors share bytes, and none belongs to no tensor: the format has it so."""
    at = base
    for key, tensor in tensors.items():
        if tensor.offset != at:
            problem = (
                "shares bytes with another" if tensor.offset < at else f"leaves {tensor.offset - at:,} bytes unused"
            )
            raise CheckpointError(f"the tensor {key[:80]!r} {problem}", where=where)
        at += tensor.nbytes
    if size is not None and at < size:
        raise CheckpointError(f"the file has {size - at:,} bytes that belong to no tensor", where=where)


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], length: int = 0
) -> bytes:
    """The header of tensors that lie one behind the other: `(name, dtype, shape, bytes)`; at least `length` bytes."""
    document: dict[str, Any] = {METADATA: dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        document[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text.ljust(max(length - 8, len(text) + -len(text) % 8))  # the data begins at a multiple of eight bytes
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header would have {len(text):,} bytes, more than safetensors allows")
    return len(text).to_bytes(8, "little") + text
