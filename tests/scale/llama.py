"""Write the metadata of a Llama-3-405B's train state as 1,024 processes leave it behind: everything but the values.

The layout is what Orbax 0.12 writes and merges: `_METADATA`, `_sharding` (which lists the whole mesh for every array),
one file of `array_metadatas` per process, and an OCDBT store with a chunk per array and process. Data files have their
length and no content. The store's tree is encoded here by columns: a writer that takes value by value needs minutes.
"""

import base64
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from orbaxkit.formats import ocdbt_writer as ocdbt
from orbaxkit.formats.ocdbt_nodes import MANIFEST_MAGIC, NODE_MAGIC

AXIS = "fsdp"
FILE_BYTES = 2 << 30
# TensorStore cuts a node where its entries, decoded, are so large, as Orbax configures it, or so many.
NODE_BYTES = 100_000_000
NODE_ENTRIES = 1 << 20
_ENTRY_BYTES = 16
_INLINE_BYTES = 1024


@dataclass(frozen=True)
class Model:
    """Its sizes, and how many processes saved it, each with a shard of every array."""

    layers: int = 126
    width: int = 16384
    hidden: int = 53248
    keys: int = 1024
    vocabulary: int = 128256
    processes: int = 1024
    is_scanned: bool = False


SMALL = Model(layers=6, width=64, hidden=192, keys=16, vocabulary=512, processes=16)


@dataclass(frozen=True)
class Array:
    """One array of the state; `axis` is the one that is cut into shards."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...] = ()
    axis: int | None = None
    dtype: str = "<f4"

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def params(model: Model) -> Iterator[Array]:
    """The model's params: nine in each layer, three beside them."""
    width, hidden, keys = model.width, model.hidden, model.keys
    layer = {
        ("attention", "q", "kernel"): (width, width),
        ("attention", "k", "kernel"): (width, keys),
        ("attention", "v", "kernel"): (width, keys),
        ("attention", "o", "kernel"): (width, width),
        ("mlp", "gate", "kernel"): (width, hidden),
        ("mlp", "up", "kernel"): (width, hidden),
        ("mlp", "down", "kernel"): (hidden, width),
        ("attention_norm", "scale"): (width,),
        ("mlp_norm", "scale"): (width,),
    }
    yield Array(("embed", "embedding"), (model.vocabulary, width), 1)
    yield Array(("final_norm", "scale"), (width,), 0)
    yield Array(("head", "kernel"), (width, model.vocabulary), 0)
    if model.is_scanned:
        yield from (Array(("layers", *path), (model.layers, *shape), 1) for path, shape in layer.items())
    else:
        for i in range(model.layers):
            yield from (Array((f"layers_{i}", *path), shape, 0) for path, shape in layer.items())


def train_state(model: Model) -> list[Array]:
    """Params, AdamW's moments and counts."""
    own = list(params(model))
    trees: list[tuple[str | int, ...]] = [("params",), ("opt_state", 0, "mu"), ("opt_state", 0, "nu")]
    copies = [replace(array, path=(*tree, *array.path)) for tree in trees for array in own]
    return [*copies, Array(("opt_state", 0, "count"), dtype="<i4"), Array(("step",), dtype="<i4")]


def write(folder: Path, model: Model) -> None:
    """Write the item into an existing empty folder."""
    arrays = train_state(model)
    _write_documents(folder, arrays, model)
    _write_store(folder, arrays, model)


def _write_documents(folder: Path, arrays: Sequence[Array], model: Model) -> None:
    tree: dict[str, Any] = {str(array.path): _entry(array.path, "jax.Array", False, array, model) for array in arrays}
    for i in (1, 2):
        tree[str(("opt_state", i))] = _entry(("opt_state", i), "None", True, None, model)
    settings = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    metadata = {"tree_metadata": tree, **settings, "custom_metadata": None}
    (folder / "_METADATA").write_text(json.dumps(metadata))
    shardings = {base64.b64encode(array.name.encode()).decode(): _sharding(array, model) for array in arrays}
    (folder / "_sharding").write_text(json.dumps(shardings, separators=(",", ":")))
    found = [{"array_metadata": _array_metadata(array, model)} for array in arrays]
    (folder / "array_metadatas").mkdir()
    first = folder / "array_metadatas" / "process_0"
    first.write_text(json.dumps({"array_metadatas": found}))
    for process in range(1, model.processes):  # all alike: links spare half a gigabyte
        os.link(first, first.with_name(f"process_{process}"))


def _entry(path: Sequence[str | int], kind: str, is_skipped: bool, array: Array | None, model: Model) -> Any:
    value: dict[str, Any] = {"value_type": kind, "skip_deserialize": is_skipped}
    if array is not None:
        value["write_shape"] = _shard(array, model)
    keys = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path]
    return {"key_metadata": keys, "value_metadata": value}


def _array_metadata(array: Array, model: Model) -> Any:
    shard = _shard(array, model)
    return {"param_name": array.name, "write_shape": shard, "chunk_shape": shard, "ext_metadata": None}


def _sharding(array: Array, model: Model) -> str:
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": [model.processes],
            "axis_names": [AXIS],
            "axis_types": ["AxisType.Auto"],
            "partition_spec": [] if array.axis is None else [*[None] * array.axis, AXIS],
            "device_mesh": {"mesh": [{"id": i} for i in range(model.processes)]},
        }
    )


def _shard(array: Array, model: Model) -> list[int]:
    return [size // model.processes if i == array.axis else size for i, size in enumerate(array.shape)]


@dataclass(frozen=True)
class _Keys:
    """The keys of an array's chunks in their order, in the pieces that a node has of them; who wrote each."""

    first: bytes
    last: bytes
    shared: np.ndarray  # with the key before, the first with none
    tails: list[bytes]
    process: np.ndarray


@lru_cache
def _keys(rank: int, axis: int | None, processes: int) -> _Keys:
    pairs = []
    for process in range(1 if axis is None else processes):
        parts = [b"%d" % process if i == axis else b"0" for i in range(rank)]
        pairs.append((b".".join(parts) or b"0", process))
    keys, process = zip(*sorted(pairs), strict=True)
    shared = [0, *(ocdbt._shared(a, b) for a, b in pairwise(keys))]
    tails = [key[n:] for key, n in zip(keys, shared, strict=True)]
    return _Keys(keys[0], keys[-1], np.array(shared), tails, np.array(process))


@dataclass(frozen=True)
class _Chunks:
    """The chunks of one array: how long each is and where it lies."""

    array: Array
    keys: "_Keys"
    length: np.ndarray
    offset: np.ndarray  # in the process's data; one whole data file lies behind the other

    @property
    def is_inline(self) -> bool:
        return int(self.length.max()) <= _INLINE_BYTES


def _write_store(folder: Path, arrays: Sequence[Array], model: Model) -> None:
    used = np.zeros(model.processes, np.int64)
    chunks = [_chunks(array, model, used) for array in arrays]
    files = [_data_files(folder, process, int(size)) for process, size in enumerate(used)]
    chunks.sort(key=lambda own: own.array.name.encode() + b"/")
    nodes, nodes_file = _cut(chunks), "d/" + "0" * 32
    (folder / "d").mkdir()
    with open(folder / nodes_file, "wb") as file:
        written = [_write_leaf(file, nodes_file, node, files, model, len(nodes) > 1) for node in nodes]
        height = int(len(written) > 1)
        root = written[0] if not height else _write_root(file, nodes_file, written)
    (folder / "manifest.ocdbt").write_bytes(_envelope(MANIFEST_MAGIC, ocdbt._manifest(root, height)))


def _chunks(array: Array, model: Model, used: np.ndarray) -> _Chunks:
    """The array's chunks, entered behind what the processes wrote before: compressed by some percent, each its own."""
    keys = _keys(len(array.shape), array.axis, model.processes)
    nbytes = math.prod(_shard(array, model)) * np.dtype(array.dtype).itemsize
    length = 13 + nbytes - _random(array).integers(0, nbytes // 20 + 1, len(keys.tails))
    offset = used[keys.process]
    if length.max() > _INLINE_BYTES:
        used[keys.process] += length
    return _Chunks(array, keys, length, offset)


def _data_files(folder: Path, process: int, size: int) -> list[str]:
    """The names of a process's data files, which are made with a length and nothing in them."""
    (folder / f"ocdbt.process_{process}" / "d").mkdir(parents=True)
    names = [f"ocdbt.process_{process}/d/{process:016x}{i:016x}" for i in range(size // FILE_BYTES + 1)]
    for name in names:
        with open(folder / name, "wb") as file:
            os.truncate(file.fileno(), 2 * FILE_BYTES)
    return names


def _cut(chunks: Sequence[_Chunks]) -> list[list[_Chunks]]:
    """The arrays in runs, one for each leaf node."""
    out: list[list[_Chunks]] = [[]]
    size = count = 0
    for own in chunks:
        value = int(own.length.max()) if own.is_inline else 0
        nbytes = len(own.length) * (_ENTRY_BYTES + len(own.array.name) + 8 + value)
        if out[-1] and (size + nbytes > NODE_BYTES or count + 1 + len(own.length) > NODE_ENTRIES):
            out.append([])
            size = count = 0
        out[-1].append(own)
        size, count = size + nbytes, count + 1 + len(own.length)
    return out


def _write_leaf(
    file: Any, name: str, chunks: Sequence[_Chunks], files: Sequence[Sequence[str]], model: Model, has_parent: bool
) -> ocdbt._Node:
    firsts = [own.array.name.encode() + b"/.zarray" for own in chunks]
    lasts = [own.array.name.encode() + b"/" + own.keys.last for own in chunks]
    prefix = ocdbt._shared(firsts[0], lasts[-1]) if has_parent else 0
    shared: list[np.ndarray] = []
    tails: list[bytes] = []
    for i, (own, first) in enumerate(zip(chunks, firsts, strict=True)):
        skip = ocdbt._shared(lasts[i - 1], first) if i else prefix
        shared.append(np.append(skip, own.keys.shared + len(own.array.name) + 1) - prefix)
        tails += [first[skip:], *own.keys.tails]
    table = sorted(name for own in files for name in own)
    ids = {name: i for i, name in enumerate(table)}
    by_process = np.array([[ids[own[min(i, len(own) - 1)]] for i in range(max(map(len, files)))] for own in files])
    outside = [own for own in chunks if not own.is_inline]
    offsets = _joined([own.offset for own in outside])
    process = _joined([own.keys.process for own in outside])
    documents = [_zarray(own.array, model) for own in chunks]
    lengths = [np.append(len(text), own.length) for own, text in zip(chunks, documents, strict=True)]
    kinds = [np.append(0, np.full(len(own.length), not own.is_inline)) for own in chunks]
    body = b"".join(
        [
            b"\0",
            _file_table(table),
            ocdbt._varint(len(tails)),
            _column(_joined(shared)[1:]),
            _column([len(tail) for tail in tails]),
            *tails,
            _column(_joined(lengths)),
            _joined(kinds).astype(np.uint8).tobytes(),
            _column(by_process[process, offsets // FILE_BYTES]),
            _column(offsets % FILE_BYTES),
            *(text + _inline(own) for own, text in zip(chunks, documents, strict=True)),
        ]
    )
    where = _append(file, name, body)
    value_bytes = sum(int(own.length.sum()) for own in outside)
    return ocdbt._Node(firsts[0], prefix, where, len(tails), where.length, value_bytes)


def _write_root(file: Any, name: str, nodes: Sequence[ocdbt._Node]) -> ocdbt._Node:
    body = b"".join(
        [
            b"\1",
            _file_table([name]),
            ocdbt._varint(len(nodes)),
            ocdbt._keys([node.first for node in nodes], [node.prefix for node in nodes]),
            ocdbt._column([0] * len(nodes)),
            ocdbt._column(node.location.offset for node in nodes),
            ocdbt._column(node.location.length for node in nodes),
            ocdbt._statistics(nodes),
        ]
    )
    where = _append(file, name, body)
    totals = (sum(column) for column in zip(*((n.keys, n.tree_bytes, n.value_bytes) for n in nodes), strict=True))
    return ocdbt._Node(nodes[0].first, 0, where, *totals)


def _zarray(array: Array, model: Model) -> bytes:
    document = {
        "chunks": _shard(array, model),
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
        "dtype": array.dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _inline(own: _Chunks) -> bytes:
    """Small values lie in the tree; what they hold does not matter here, only that it is not all the same."""
    size = int(own.length.sum()) if own.is_inline else 0
    return _random(own.array).bytes(size)


def _random(array: Array) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(array.name.encode()))


def _append(file: Any, name: str, body: bytes) -> ocdbt._Location:
    data = _envelope(NODE_MAGIC, body)
    start = file.tell()
    file.write(data)
    return ocdbt._Location(name, start, len(data))


def _envelope(magic: bytes, body: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=0).compress(body)
    data = magic + (len(packed) + 18).to_bytes(8, "little") + b"\0\1" + packed
    return data + google_crc32c.value(data).to_bytes(4, "little")


def _file_table(files: Sequence[str]) -> bytes:
    """Data files by sorted name; what comes before `d/` is the folder of the store that wrote them."""
    names = [name.encode() for name in files]
    shared = [ocdbt._shared(a, b) for a, b in pairwise(names)]
    tails = [name[skip:] for name, skip in zip(names, [0, *shared], strict=True)]
    bases = [name.index(b"d/") for name in names]
    return b"".join([ocdbt._varint(len(names)), *map(_column, (shared, [len(t) for t in tails], bases)), *tails])


def _column(numbers: Any) -> bytes:
    """Varints, by numpy."""
    rest = np.asarray(numbers, np.uint64)
    if not len(rest):
        return b""
    digits = (rest[:, None] >> np.arange(0, 63, 7, dtype=np.uint64)).astype(np.uint8) & 127
    count = np.maximum(1, 9 - (digits[:, ::-1] != 0).argmax(axis=1))
    count[~digits.any(axis=1)] = 1
    position = np.arange(9)
    digits |= (position < (count - 1)[:, None]).astype(np.uint8) << 7
    return digits[position < count[:, None]].tobytes()


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)
