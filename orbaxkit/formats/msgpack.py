"""Flax's msgpack files, decoded without their arrays: an array stays a reference to its bytes in the file.

Only structure is read, so a file of any size opens in memory for its keys. Every length is checked against what is
left of the file, nesting is bounded, and the extension types are Flax's three: 1 array, 2 complex, 3 numpy scalar.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder, check_not_lfs, checked_sizes, file_error
from orbaxkit.specs import DTYPES

MAX_DEPTH = 100
_CHUNKED = "__msgpack_chunked_array__"

# First byte -> (struct format of what follows, what it is).
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_LENGTHS = {
    0xC4: (">B", "bytes"),
    0xC5: (">H", "bytes"),
    0xC6: (">I", "bytes"),
    0xC7: (">B", "ext"),
    0xC8: (">H", "ext"),
    0xC9: (">I", "ext"),
    0xD9: (">B", "str"),
    0xDA: (">H", "str"),
    0xDB: (">I", "str"),
    0xDC: (">H", "list"),
    0xDD: (">I", "list"),
    0xDE: (">H", "dict"),
    0xDF: (">I", "dict"),
}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array inside the file: C order, its bytes at `pieces` of `(offset, length)` one after the other."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in the file."""
        return sum(length for _, length in self.pieces)


# dict[str, Node], list[Node], StoredArray, None, bool, int, float, complex, str, bytes or np.generic
Node = Any


def decode(file: Any, size: int, where: str) -> Node:
    """The tree in a msgpack file of `size` bytes; `where` names it in errors."""
    reader = _Reader(file, size, where)
    tree = reader.value(0)
    if reader.at != size:
        raise reader.bad(f"has {size - reader.at:,} bytes after its end")
    return tree


@dataclass
class _Reader:
    file: Any
    size: int
    where: str
    at: int = 0

    def bad(self, problem: str) -> CheckpointError:
        return file_error(self.where, problem)

    def take(self, length: int) -> bytes:
        self.claim(length)
        data = self.file.read(length)
        if len(data) != length:
            raise self.bad(f"is cut short at byte {self.at + len(data):,}")
        self.at += length
        return data

    def claim(self, length: int) -> None:
        if length > self.size - self.at:
            raise self.bad(
                f"is cut short or damaged: it has {self.size:,} bytes, byte {self.at:,} claims {length:,} more"
            )

    def skip(self, length: int) -> None:
        self.claim(length)
        self.file.seek(length, 1)
        self.at += length

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def head(self) -> tuple[str, Any]:
        """What comes next: `("value", value)`, or what kind of thing and its length."""
        first = self.take(1)[0]
        if first < 0x80 or first >= 0xE0:
            return "value", first if first < 0x80 else first - 256
        if first < 0xC0:
            kind, bits = ("dict", 0x0F) if first < 0x90 else ("list", 0x0F) if first < 0xA0 else ("str", 0x1F)
            return kind, first & bits
        if first in _CONSTANTS:
            return "value", _CONSTANTS[first]
        if first in _NUMBERS:
            return "value", self.number(_NUMBERS[first])
        if first in _FIXED_EXT:
            return "ext", _FIXED_EXT[first]
        if first not in _LENGTHS:
            raise self.bad(f"is not msgpack: byte {self.at - 1:,} is 0x{first:02x}")
        form, kind = _LENGTHS[first]
        return kind, self.number(form)

    def value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.bad(f"is nested more than {MAX_DEPTH} levels deep")
        kind, length = self.head()
        if kind == "value":
            return length
        if kind == "str":
            return self.text(length)
        if kind == "bytes":
            return self.take(length)
        if kind == "ext":
            return self.extension(length)
        self.claim(length)  # each entry takes at least a byte
        if kind == "list":
            return [self.value(depth + 1) for _ in range(length)]
        return self.mapping(length, depth)

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"holds text that is not UTF-8 near byte {self.at:,}") from None

    def mapping(self, length: int, depth: int) -> Node:
        out: dict[str, Node] = {}
        for _ in range(length):
            key = self.key()
            if key in out:
                raise self.bad(f"names the key {key!r} twice")
            out[key] = self.value(depth + 1)
        return self.join_chunks(out) if out.get(_CHUNKED) is True else out

    def key(self) -> str:
        kind, value = self.head()
        if kind in ("str", "bytes"):
            return self.text(value)
        if kind == "value" and type(value) is int:
            return str(value)
        raise self.bad(f"has a key that is no text before byte {self.at:,}")

    def extension(self, length: int) -> Node:
        code = self.number(">b")
        self.claim(length)
        end = self.at + length
        value = self.complex_number() if code == 2 else self.array(code) if code in (1, 3) else None
        if value is None or self.at != end:
            raise self.bad(f"holds an extension value (type {code}) that Flax does not write, before byte {end:,}")
        return value

    def complex_number(self) -> Node:
        parts = self.value(MAX_DEPTH - 1)
        good = isinstance(parts, list) and len(parts) == 2 and all(type(part) in (int, float) for part in parts)
        return complex(*parts) if good else None

    def array(self, code: int) -> Node:
        """Flax packs (shape, dtype name, bytes); a numpy scalar the same with shape ()."""
        kind, count = self.head()
        if kind != "list" or count not in (2, 3):
            return None
        shape = checked_sizes(self.value(MAX_DEPTH - 1), self.where, "an array's shape") if count == 3 else ()
        dtype = self.dtype()
        kind, length = self.head()
        if kind not in ("bytes", "str"):
            return None
        start = self.at
        if math.prod(shape) * dtype.itemsize != length:
            raise self.bad(
                f"holds an array of shape {shape} and dtype {dtype.name} in {length:,} bytes at byte {start:,}"
            )
        if code == 3 and not shape:
            return np.frombuffer(self.take(length), dtype)[0]
        self.skip(length)
        return StoredArray(shape, dtype, ((start, length),))

    def dtype(self) -> np.dtype:
        kind, length = self.head()
        name = self.text(length) if kind in ("str", "bytes") and length < 64 else ""
        if name not in DTYPES:
            raise self.bad(f"names an unknown dtype: {name}")
        return DTYPES[name]

    def join_chunks(self, node: dict[str, Node]) -> StoredArray:
        """Flax cuts arrays above a gigabyte into flat chunks."""
        shape_node, chunks = node.get("shape"), node.get("chunks")
        if not isinstance(shape_node, dict) or not isinstance(chunks, dict) or not chunks:
            raise self.bad("holds a chunked array without shape or chunks")
        parts = list(_in_order(chunks))
        shape = checked_sizes(list(_in_order(shape_node)), self.where, "a chunked array's shape")
        if not all(isinstance(part, StoredArray) and part.dtype == parts[0].dtype for part in parts):
            raise self.bad("holds a chunked array whose chunks are not alike")
        joined = StoredArray(shape, parts[0].dtype, tuple(piece for part in parts for piece in part.pieces))
        if joined.nbytes != math.prod(shape) * joined.dtype.itemsize:
            raise self.bad(f"holds a chunked array of shape {shape} in {joined.nbytes:,} bytes")
        return joined


def _in_order(node: dict[str, Node]) -> Iterator[Node]:
    return (node[key] for key in sorted(node, key=lambda key: (len(key), key)))


def read_into(file: Any, array: StoredArray, index: tuple[slice, ...], out: np.ndarray, where: str) -> None:
    """Fill `out` with a region: straight from the file where it is the whole array, through a copy of it where not."""
    whole = out.shape == array.shape
    target = out if whole else np.empty(array.shape, array.dtype)
    view = memoryview(target.reshape(-1).view(np.uint8)) if target.size else memoryview(b"")
    at = 0
    for offset, length in array.pieces:
        file.seek(offset)
        if length and file.readinto(view[at : at + length]) != length:
            raise file_error(where, f"is cut short at byte {offset:,}")
        at += length
    if not whole:
        out[...] = target[index]


def decode_file(folder: Folder, name: str) -> Node:
    """The tree in a msgpack file of a folder."""
    where = folder.where(name)
    with folder.open(name) as file:
        head = file.read(64)
        if not head:
            raise file_error(where, "is empty", hint="the save or the download was cut short")
        check_not_lfs(head, where)
        if head.startswith(b"model_checkpoint_path:"):
            raise file_error(where, "is TensorFlow's list of its checkpoints, not an Orbax or Flax checkpoint")
        size = folder.file_size(name) if folder.is_local else file.load()
        file.seek(0)
        return decode(file, size or 0, where)
