"""Write an OCDBT store: values go to data files as they come, then the B+tree's nodes, then the manifest.

The format is TensorStore's, as its page on the `ocdbt` key-value store describes it. A node's keys lack the prefix that
its subtree shares, and each key lacks what it shares with the key before it; numbers lie in columns of varints.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import IO, Any

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.decoding import crc32c
from orbaxkit.formats.files import pread_into
from orbaxkit.formats.ocdbt import MANIFEST, short_reason
from orbaxkit.formats.ocdbt_nodes import MANIFEST_MAGIC, NODE_MAGIC
from orbaxkit.formats.remote import CONTEXT
from orbaxkit.formats.sinks import Encoded
from orbaxkit.formats.staging import Staging, sync, write_all, write_file

# As Orbax configures its stores, so that it can append to this one.
_MAX_INLINE_BYTES = 1024
_MAX_NODE_BYTES = 100_000_000
_ARITY_LOG2 = 4

_NODE_BYTES = 256 << 10  # a node's keys and inline values; small enough that finding one key stays cheap
_NODE_CHILDREN = 1024
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Location:
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A written node, as its parent sees it."""

    first: bytes
    prefix: int  # how many bytes all keys below share
    location: _Location
    keys: int
    tree_bytes: int
    value_bytes: int


@dataclass
class _DataFile:
    name: str  # relative to the store
    file: IO[bytes]
    size: int = 0

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end."""
        write_all(self.file, data)
        self.size += len(data)


@dataclass
class OcdbtWriter:
    """A store being written in an existing empty folder.

    Values may be written by several threads at once: each lies in one piece, and has a data file to itself meanwhile.
    """

    path: str
    node_bytes: int = _NODE_BYTES
    node_children: int = _NODE_CHILDREN
    file_bytes: int = Staging.file_bytes
    _entries: dict[bytes, bytes | _Location] = field(default_factory=dict)
    _files: list[_DataFile] = field(default_factory=list)
    _free: list[_DataFile] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a whole value."""
        if len(data) <= _MAX_INLINE_BYTES:
            self._enter(key, bytes(data))
            return
        value = self.start(key)
        value.write(data)
        value.finish()

    def start(self, key: str) -> "ValueWriter":
        """Begin a value that is written bit by bit."""
        with self._lock:
            file = self._free.pop() if self._free else None
        file = file or self._new_file()
        return ValueWriter(self, key, file, file.size)

    def copy(self, key: str, value: Encoded) -> None:
        """Write a value that lies in a file elsewhere, by way of a small buffer."""
        if value.length <= _MAX_INLINE_BYTES:
            self.put(key, b"".join(_blocks(value)))
            return
        writer = self.start(key)
        for block in _blocks(value):
            writer.write(block)
        writer.finish()

    def close(self) -> None:
        """Write the tree and the manifest, once every file that it names is on disk."""
        root, height = self._write_tree()
        for file in self._files:
            sync(file.file)
            file.file.close()
        write_file(f"{self.path}/{MANIFEST}", _envelope(MANIFEST_MAGIC, _manifest(root, height)))

    def discard(self) -> None:
        """Let go of the files, finished or not."""
        for file in self._files:
            file.file.close()

    def _new_file(self) -> _DataFile:
        name = f"d/{secrets.token_hex(16)}"
        with suppress(FileExistsError):  # not makedirs: who was given up must not make the store again
            os.mkdir(f"{self.path}/d")
        out = _DataFile(name, open(f"{self.path}/{name}", "xb", buffering=0))  # noqa: SIM115
        with self._lock:
            self._files.append(out)
        return out

    def _enter(self, key: str, value: bytes | _Location) -> None:
        encoded = key.encode("utf-8", "surrogateescape")
        with self._lock:
            if encoded in self._entries:
                raise CheckpointError(f"two values have the key {key!r}", where=self.path)
            self._entries[encoded] = value

    def _release(self, file: _DataFile) -> None:
        if file.size < self.file_bytes:
            with self._lock:
                self._free.append(file)

    def _write_tree(self) -> tuple[_Node | None, int]:
        """All nodes, children before parents; the root, None for an empty store, and its height."""
        leaves = _cut([(key, self._entries[key]) for key in sorted(self._entries)], self.node_bytes)
        if not leaves:
            return None, 0
        prefixes = [_shared(leaf[0][0], leaf[-1][0]) if len(leaves) > 1 else 0 for leaf in leaves]
        nodes = [self._write_leaf(leaf, prefix) for leaf, prefix in zip(leaves, prefixes, strict=True)]
        height = 0
        while len(nodes) > 1:
            height += 1
            groups = [nodes[i : i + self.node_children] for i in range(0, len(nodes), self.node_children)]
            nodes = [self._write_interior(group, height, is_root=len(groups) == 1) for group in groups]
        return nodes[0], height

    def _write_leaf(self, entries: Sequence[tuple[bytes, bytes | _Location]], prefix: int) -> _Node:
        values = [value for _, value in entries]
        located = [value for value in values if isinstance(value, _Location)]
        files = sorted({value.file for value in located})
        ids = {file: i for i, file in enumerate(files)}
        body = b"".join(
            [
                b"\0",
                _file_table(files),
                _varint(len(entries)),
                _keys([key[prefix:] for key, _ in entries]),
                _column(value.length if isinstance(value, _Location) else len(value) for value in values),
                _column(int(isinstance(value, _Location)) for value in values),
                _column(ids[value.file] for value in located),
                _column(value.offset for value in located),
                *(value for value in values if isinstance(value, bytes)),
            ]
        )
        where = self._append_node(body)
        value_bytes = sum(value.length for value in located)
        return _Node(entries[0][0], prefix, where, len(entries), where.length, value_bytes)

    def _write_interior(self, nodes: Sequence[_Node], height: int, *, is_root: bool) -> _Node:
        prefix = 0 if is_root else min(_shared(nodes[0].first, nodes[-1].first), *(node.prefix for node in nodes))
        files = sorted({node.location.file for node in nodes})
        ids = {file: i for i, file in enumerate(files)}
        body = b"".join(
            [
                bytes([height]),
                _file_table(files),
                _varint(len(nodes)),
                _keys([node.first[prefix:] for node in nodes], [node.prefix - prefix for node in nodes]),
                _column(ids[node.location.file] for node in nodes),
                _column(node.location.offset for node in nodes),
                _column(node.location.length for node in nodes),
                _statistics(nodes),
            ]
        )
        where = self._append_node(body)
        tree_bytes = where.length + sum(node.tree_bytes for node in nodes)
        keys, value_bytes = sum(node.keys for node in nodes), sum(node.value_bytes for node in nodes)
        return _Node(nodes[0].first, prefix, where, keys, tree_bytes, value_bytes)

    def _append_node(self, body: bytes) -> _Location:
        data = _envelope(NODE_MAGIC, body)
        file = self._files[-1] if self._files else self._new_file()
        start = file.size
        file.append(data)
        return _Location(file.name, start, len(data))


def merge(spec_of: Callable[[str], dict[str, Any]], parts: Sequence[str], where: str) -> int:
    """Write the tree of a store whose values stay in the stores `parts` below it; how many keys it has.

    `spec_of` gives TensorStore's spec of the store's folder, or of one below it.

    TensorStore does it, in one transaction: it copies the parts' trees without their values, where all share a context.
    """
    import tensorstore as ts

    context, transaction = ts.Context(CONTEXT), ts.Transaction(atomic=True)
    config = {"max_inline_value_bytes": _MAX_INLINE_BYTES, "max_decoded_node_bytes": _MAX_NODE_BYTES}
    # assume_config as Orbax: else an empty manifest comes first
    spec = {"driver": "ocdbt", "base": spec_of(""), "config": config, "assume_config": True}
    try:
        whole = ts.KvStore.open(spec, context=context).result()
        for part in parts:
            store = ts.KvStore.open({"driver": "ocdbt", "base": spec_of(part)}, context=context).result()
            store.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        transaction.commit_async().result()
        return len(whole.list().result())
    except ValueError as error:
        raise CheckpointError(f"the parts of the store cannot be merged: {short_reason(error)}", where=where) from None


@dataclass
class ValueWriter:
    """One value being written at the end of a data file."""

    store: OcdbtWriter
    key: str
    file: _DataFile
    start: int
    _head: bytes = b""  # kept back while the value may still be short enough to lie in the tree

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        if self.file.size == self.start:
            if len(self._head) + len(data) <= _MAX_INLINE_BYTES:
                self._head += bytes(data)
                return
            self.file.append(self._head)
        self.file.append(data)

    @property
    def size(self) -> int:
        """How many bytes there are so far."""
        return self.file.size - self.start or len(self._head)

    def finish(self) -> None:
        """Enter the value into the tree."""
        length = self.file.size - self.start
        self.store._enter(self.key, _Location(self.file.name, self.start, length) if length else self._head)
        self.store._release(self.file)


def _blocks(value: Encoded) -> Iterable[memoryview]:
    """The bytes of a value in a file; a file that ends too soon is an error."""
    buffer = memoryview(bytearray(min(_COPY_BYTES, value.length)))
    done = 0
    while done < value.length:
        count = pread_into(value.file, buffer[: value.length - done], value.offset + done)
        if not count:
            end = value.offset + value.length
            raise CheckpointError(f"a file is cut short: it should reach byte {end:,}", where=value.where)
        yield buffer[:count]
        done += count


def _cut(
    entries: Sequence[tuple[bytes, bytes | _Location]], most_bytes: int
) -> list[Sequence[tuple[bytes, bytes | _Location]]]:
    """The sorted entries in runs, one for each leaf node."""
    cuts, size = [0], 0
    for i, (key, value) in enumerate(entries):
        own = len(key) + 16 + (len(value) if isinstance(value, bytes) else 0)
        if size and size + own > most_bytes:
            cuts.append(i)
            size = 0
        size += own
    return [entries[a:b] for a, b in pairwise([*cuts, len(entries)]) if a < b]


def _manifest(root: _Node | None, height: int) -> bytes:
    """The store's configuration, and one version: the tree just written."""
    config = b"".join(
        [
            secrets.token_bytes(16),  # which store this is
            b"\0",  # one manifest file, not numbered ones
            _varint(_MAX_INLINE_BYTES),
            _varint(_MAX_NODE_BYTES),
            bytes([_ARITY_LOG2]),
            b"\1" + bytes(4),  # zstd, level 0
        ]
    )
    # No root is an offset and a length that no file can have.
    where = root.location if root else _Location("", _NOWHERE, _NOWHERE)
    version = b"".join(
        [
            _file_table([where.file]),
            b"\1\1",  # one version, the first generation
            bytes([height]),
            _column([0, where.offset, where.length]),
            _statistics([root]) if root else bytes(3),
            time.time_ns().to_bytes(8, "little"),
            b"\0",  # no older versions
        ]
    )
    return config + version


_NOWHERE = 2**64 - 1


def _envelope(magic: bytes, body: bytes) -> bytes:
    """Magic, length, format version 0, zstd, the body, and the CRC-32C of it all."""
    import zstandard

    packed = zstandard.ZstdCompressor(level=1).compress(body)
    length = len(magic) + 8 + 2 + len(packed) + 4
    data = magic + length.to_bytes(8, "little") + b"\0\1" + packed
    return data + crc32c(data).to_bytes(4, "little")


def _statistics(nodes: Sequence[_Node]) -> bytes:
    return b"".join(
        [
            _column(node.keys for node in nodes),
            _column(node.tree_bytes for node in nodes),
            _column(node.value_bytes for node in nodes),
        ]
    )


def _file_table(files: Sequence[str]) -> bytes:
    """Data files by sorted name; a path that is shared with other stores has no use here and stays empty."""
    names = [file.encode() for file in files]
    shared = [_shared(a, b) for a, b in pairwise(names)]
    tails = [name[skip:] for name, skip in zip(names, [0, *shared], strict=False)]
    return b"".join([_varint(len(names)), _column(shared), _column(map(len, tails)), _column([0] * len(names)), *tails])


def _keys(keys: Sequence[bytes], prefixes: Sequence[int] | None = None) -> bytes:
    """Keys without what each shares with the one before; `prefixes` only for interior nodes."""
    shared = [_shared(a, b) for a, b in pairwise(keys)]
    tails = [key[skip:] for key, skip in zip(keys, [0, *shared], strict=True)]
    return b"".join([_column(shared), _column(map(len, tails)), _column(prefixes or ()), *tails])


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes two keys have in common at their start."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def _column(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
