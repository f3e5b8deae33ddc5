"""Write safetensors: one file, or a folder of files in Hugging Face's layout."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from threading import Lock
from typing import IO, Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Value
from orbaxkit.formats.detect import absolute_path
from orbaxkit.formats.orbax_documents import stored_name
from orbaxkit.formats.orbax_sink import OrbaxSettings, check_names
from orbaxkit.formats.safetensors import SUFFIX
from orbaxkit.formats.safetensors_header import METADATA, NAMES, encode_header, name_problem
from orbaxkit.formats.safetensors_sidecar import KEY, encode
from orbaxkit.formats.sinks import PART_BYTES, Encoded, Spans, text_of
from orbaxkit.formats.staging import Staging, copy_beside, sync, write_file, writing
from orbaxkit.formats.value_stream import slabs
from orbaxkit.formats.zarr import ZarrArray
from orbaxkit.specs import LeafSpec, Specs

MAX_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_UNKNOWN_TEXT_BYTES = 4096
_ROOT = "value"  # the name of a tree that is one array


@dataclass
class _Tensor:
    """One tensor on its way."""

    name: str
    spec: LeafSpec
    shard: int = 0
    offset: int = 0
    missing: int = 0  # bytes


@dataclass
class SafetensorsSink:
    """A `Sink` for a file, where `path` ends in `.safetensors`, else for a folder of files.

    Strings, empty nodes, typed paths and ties go into the first file's metadata, from where orbaxkit reads them back;
    `settings` say how an Orbax item that is made of these files is to be stored.
    """

    path: str | os.PathLike[str]
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False
    metadata_format: str = "pt"
    settings: OrbaxSettings | None = None
    part_bytes: int = PART_BYTES
    beside: Mapping[str, str] = field(default_factory=dict)  # names and paths of what else lies in the step
    _specs: Specs = field(init=False, default_factory=lambda: Specs({}, {}))
    _tensors: dict[str, _Tensor] = field(init=False, default_factory=dict)
    _names: dict[str, str] = field(init=False, default_factory=dict)  # of tensors, by leaf; of tied leaves too
    _tied: dict[str, str] = field(init=False, default_factory=dict)
    _shards: list[list[_Tensor]] = field(init=False, default_factory=list)
    _texts: dict[str, str] = field(init=False, default_factory=dict)
    _files: list[IO[bytes]] = field(init=False, default_factory=list)
    _staging: Staging | None = field(init=False, default=None)
    _lock: Lock = field(init=False, default_factory=Lock)

    @property
    def _is_file(self) -> bool:
        return os.fspath(self.path).endswith(SUFFIX)

    def begin(self, specs: Specs, tied: Mapping[str, str] | None = None) -> None:
        """Announce every leaf; of tied ones only the first is stored.

        Raises CheckpointError: PRNG keys, dtypes without a name in safetensors, leaves that share a name, all named; a
        destination that stands, or too little room on its disk.
        """
        self._specs, self._tied = specs, dict(tied or {})
        _check(specs, self._tied)
        arrays = {name: spec for name, spec in specs.leaves.items() if spec.kind not in ("string", "empty")}
        self._names = {name: stored_name(specs.paths[name]) or _ROOT for name in arrays}
        self._tensors = {
            name: _Tensor(self._names[name], spec, missing=spec.nbytes)
            for name, spec in arrays.items()
            if name not in self._tied
        }
        limit = math.inf if self._is_file else float(self.max_shard_bytes)
        self._shards = _fill_shards(self._tensors.values(), limit)
        needed = (1 << 20) + sum(1024 + spec.nbytes for spec in specs.leaves.values())
        path = absolute_path(self.path)
        self._staging = Staging.begin(path, needed_bytes=needed, overwrite=self.overwrite, is_folder=not self._is_file)
        with writing(path):
            self._files = [open(self._file(i), "xb", buffering=0) for i in range(len(self._shards))]  # noqa: SIM115
        for i, tensors in enumerate(self._shards):
            at = len(self._header(i)) + (_text_bytes(specs) if i == 0 else 0)
            for tensor in tensors:
                tensor.offset = at
                at += tensor.spec.nbytes

    def _file(self, shard: int) -> str:
        temporary = self._open_staging.temporary
        return temporary if self._is_file else f"{temporary}/{self._file_name(shard)}"

    def _file_name(self, shard: int) -> str:
        count = len(self._shards)
        return f"model{SUFFIX}" if count == 1 else f"model-{shard + 1:05}-of-{count:05}{SUFFIX}"

    @property
    def _open_staging(self) -> Staging:
        if self._staging is None:
            raise ValueError("begin() comes first")
        return self._staging

    def _header(self, shard: int, length: int = 0) -> bytes:
        metadata: dict[str, str] = {}
        if shard == 0:
            metadata |= {self._names[name]: self._names[kept] for name, kept in self._tied.items()}
            tensors = {name: self._names[self._tied.get(name, name)] for name in self._names}
            settings = {} if self.settings is None else _fields(self.settings)
            metadata[KEY] = encode(self._specs, tensors, self._tied, self._texts, settings)
        metadata["format"] = self.metadata_format  # a tied leaf of that name is in the sidecar, too
        entries = [
            (t.name, t.spec.dtype.name, t.spec.data_shape, t.spec.nbytes) for t in self._shards[shard] if t.spec.dtype
        ]
        return encode_header(entries, metadata, length)

    def parts(self, name: str) -> Iterator[Spans]:
        """The parts of an array leaf: runs of rows. None of a tied one."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.spec.kind == "scalar" or tensor.spec.nbytes == 0 or tensor.spec.dtype is None:
            return
        whole = tuple([(0, size) for size in tensor.spec.data_shape])
        yield from slabs(whole, tensor.spec.dtype.itemsize, self.part_bytes)

    def write(self, name: str, spans: Spans, data: np.ndarray) -> None:
        """Write one part where it belongs."""
        tensor = self._tensors[name]
        shape = tensor.spec.data_shape
        if (
            data.shape != tuple([b - a for a, b in spans])
            or data.dtype != tensor.spec.dtype
            or not _is_run(spans, shape)
        ):
            raise ValueError(f"{name}: {data.dtype}{list(data.shape)} is not a part {spans} of {tensor.spec}")
        first = 0
        for (start, _), size in zip(spans, shape, strict=True):
            first = first * size + start
        stored = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))  # arrays in memory may have the other order
        view = memoryview(stored.reshape(-1).view(np.uint8))
        with writing(self._open_staging.path):
            _write_at(self._files[tensor.shard], view, tensor.offset + first * data.dtype.itemsize)
        with self._lock:
            tensor.missing -= len(view)

    def accepts_encoded(self, name: str, array: ZarrArray) -> bool:
        """Nothing is stored here as zarr stores it."""
        return False

    def write_encoded(self, name: str, key: str, value: Encoded) -> None:
        """Not here."""
        raise ValueError("safetensors take no encoded values")

    def value(self, name: str, value: Value | None) -> None:
        """A scalar becomes a tensor without axes, a string part of the metadata."""
        spec = self._specs[name]
        if spec.kind == "string":
            self._texts[name] = text_of(name, value)
        elif name in self._tensors:
            self.write(name, (), np.asarray(value, spec.dtype))

    def close(self) -> PurePath:
        """Write the headers and the index, bring all to disk, and rename."""
        staging = self._open_staging
        missing = [
            (name, f"{tensor.missing:,} of its bytes were not written")
            for name, tensor in self._tensors.items()
            if tensor.missing
        ]
        missing += [
            (n, "its text was not given") for n, s in self._specs.items() if s.kind == "string" and n not in self._texts
        ]
        if missing:
            raise CheckpointError("the checkpoint is not whole", leaves=missing, where=staging.path)
        with writing(staging.path):
            for i, file in enumerate(self._files):
                self._write_header(i, file)
                sync(file)
                file.close()
            if len(self._files) > 1:
                write_file(f"{staging.temporary}/{_INDEX}", self._index())
            if not self._is_file:
                copy_beside(self.beside, staging.temporary)
        return staging.commit()

    def _write_header(self, shard: int, file: IO[bytes]) -> None:
        """The header was measured before the texts were known; spaces fill what it did not need."""
        length = self._shards[shard][0].offset if self._shards[shard] else 0
        header = self._header(shard, length)
        if length and len(header) != length:
            raise CheckpointError("the strings are longer than they were announced", where=self._open_staging.path)
        end = length + sum(tensor.spec.nbytes for tensor in self._shards[shard])
        _write_at(file, memoryview(header), 0)
        file.truncate(max(end, len(header)))

    def _index(self) -> bytes:
        """Which file holds which tensor."""
        places = {tensor.name: self._file_name(tensor.shard) for tensor in self._tensors.values()}
        total = sum(tensor.spec.nbytes for tensor in self._tensors.values())
        return json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2
        ).encode()

    def abort(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.close()
        if self._staging is not None:
            self._staging.discard()


def _fields(settings: OrbaxSettings) -> dict[str, Any]:
    """Not `asdict`, which copies what a caller's metadata holds, level by level."""
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def _text_bytes(specs: Specs) -> int:
    """Room for the texts as JSON inside JSON, in multiples of eight bytes."""
    texts = [spec for spec in specs.leaves.values() if spec.kind == "string"]
    return sum(8 * (_UNKNOWN_TEXT_BYTES if s.stored_bytes is None else s.stored_bytes) + 16 for s in texts)


def _fill_shards(tensors: Iterable[_Tensor], limit: float) -> list[list[_Tensor]]:
    """Tensors in order, each shard filled up to the limit; within one, wide elements first so that all are aligned."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.spec.nbytes
    for i, shard in enumerate(shards):
        shard.sort(key=lambda tensor: -tensor.spec.dtype.itemsize if tensor.spec.dtype else 0)
        for tensor in shard:
            tensor.shard = i
    return shards


def _is_run(spans: Spans, shape: tuple[int, ...]) -> bool:
    """Whether a part's elements lie one behind the other."""
    first = next((i for i, (a, b) in enumerate(spans) if b - a > 1), len(spans))
    return all(span == (0, size) for span, size in zip(spans[first + 1 :], shape[first + 1 :], strict=True))


def _write_at(file: IO[bytes], view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(file.fileno(), view[: 1 << 30], offset)
        view, offset = view[count:], offset + count


def _check(specs: Specs, tied: Mapping[str, str]) -> None:
    foreign = [(name, problem) for name, spec in specs.leaves.items() if (problem := _problem(spec)) is not None]
    if foreign:
        raise CheckpointError(
            "safetensors cannot hold these leaves", leaves=foreign, hint="leave them out: ok.drop(...)"
        )
    names = [name for name, spec in specs.leaves.items() if spec.kind not in ("string", "empty")]
    check_names(((name, stored_name(specs.paths[name]) or _ROOT) for name in names), "safetensors")
    bad = [(name, problem) for name in names if (problem := _name_problem(stored_name(specs.paths[name])))]
    if bad:
        raise CheckpointError("safetensors cannot hold these names", leaves=bad, hint="rename them: ok.rename(...)")
    for name, kept in tied.items():
        same = kept in specs.leaves and kept not in tied and name in specs.leaves
        if not same or _facts(specs[name]) != _facts(specs[kept]):
            raise CheckpointError("a leaf is not what it is said to be tied to", leaves=[(name, f"tied to {kept}")])


def _name_problem(name: str) -> str | None:
    return "is its metadata" if name == METADATA else name_problem(name)


def _facts(spec: LeafSpec) -> tuple[Any, ...]:
    return spec.data_shape, spec.dtype


def _problem(spec: LeafSpec) -> str | None:
    if spec.kind in ("string", "empty"):
        return "is an array of strings" if spec.shape else None
    if spec.kind == "key":
        return f"is a PRNG key ({spec.key_impl})"
    if spec.dtype is None:
        return "its dtype is not known"
    return None if spec.dtype.name in NAMES else f"has the dtype {spec.dtype.name}"
