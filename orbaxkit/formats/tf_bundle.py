"""TensorFlow V2 checkpoints ("tensor bundles"), read without TensorFlow: an index, and the bytes in one or more shards.

Source: `tensor_bundle.cc` of TensorFlow, and what TensorFlow 2.21 writes. A variable's name is cut at `/` into a path;
where it lies below another variable (`kernel/adam_m` beside `kernel`), the rest is one key.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np

from orbaxkit.errors import CheckpointError, shorten
from orbaxkit.formats import Done, Pending, Value
from orbaxkit.formats.files import Folder, pread
from orbaxkit.formats.flat import BLOCK_BYTES, read_region
from orbaxkit.formats.leveldb_table import FOOTER_BYTES, Damaged, is_table, mask, masked_crc, varint
from orbaxkit.formats.tf_index import INDEX, STRING, TF_DTYPES, Entry, read_index
from orbaxkit.formats.values import kind_of, scalar_value
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.specs import DTYPES, LeafSpec, Specs

_SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")
_LIST = "checkpoint"
_LATEST = re.compile(r'^model_checkpoint_path: "([^"\n]*)"', re.MULTILINE)
_STEP = re.compile(r".*-(\d+)")


@dataclass(frozen=True)
class BundleSource:
    """A `Source` over a bundle. The CRC of a tensor is checked, over all of its bytes, when any of it is first read."""

    folder: Folder
    prefix: str
    shards: int
    specs: Specs
    held: Mapping[str, tuple[Entry, ...]]
    broken: Mapping[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = "TensorFlow"
    _checked: dict[Entry, str | None] = field(default_factory=dict, repr=False)

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Read a region, out of every piece that it touches."""
        self._refuse(name, self.broken.get(name))
        wanted = [(part.start, part.stop) for part in index]
        for entry in self.held[name]:
            spans = [
                (max(a, start), min(b, start + size))
                for (a, b), start, size in zip(wanted, entry.starts or (0,) * len(wanted), entry.shape, strict=True)
            ]
            if all(a < b for a, b in spans):
                self._read_piece(name, entry, wanted, spans, out)
        return Done()

    def _read_piece(
        self, name: str, entry: Entry, wanted: list[tuple[int, int]], spans: list[tuple[int, int]], out: np.ndarray
    ) -> None:
        self._refuse(name, self._damage(entry))
        inside = [
            (a - start, b - start) for (a, b), start in zip(spans, entry.starts or (0,) * len(spans), strict=True)
        ]
        place = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(spans, wanted, strict=True))
        piece = out if out.ndim == 0 else out[place]
        part = piece if piece.flags.c_contiguous else np.empty(piece.shape, out.dtype)
        with self.folder.open(self._file(entry), (entry.offset, entry.size)) as file:
            try:
                read_region(file, entry.offset, entry.shape, inside, part)
            except EOFError:
                self._refuse(name, f"{self._file(entry)} was cut short while it was read")
        if part is not piece:
            piece[...] = part

    def value(self, name: str) -> Value:
        """A number; a string, or an array of them: text where it is UTF-8, else bytes."""
        spec = self.specs[name]
        if spec.kind != "string":
            out = np.empty((), spec.dtype)
            self.read(name, (), out).result()
            return scalar_value(out)
        self._refuse(name, self.broken.get(name))
        (entry,) = self.held[name]
        self._refuse(name, self._missing(entry))
        texts = self._strings(name, entry)
        return texts[0] if not entry.shape else np.array(texts, object).reshape(entry.shape)

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Entries that make no sense, and shards that are missing or cut short."""
        found = ((name, self.broken.get(name) or self._missing_any(name)) for name in names)
        return [(name, problem) for name, problem in found if problem]

    def _missing_any(self, name: str) -> str | None:
        return next((told for entry in self.held[name] if (told := self._missing(entry))), None)

    def _missing(self, entry: Entry) -> str | None:
        if not self.folder.has_file(self._file(entry)):
            return f"{self._file(entry)} is missing"
        size, end = self.folder.file_size(self._file(entry)), entry.offset + entry.size
        return None if size is None or end <= size else f"{self._file(entry)} has {size:,} bytes, {end:,} are needed"

    def _damage(self, entry: Entry) -> str | None:
        if entry not in self._checked:
            self._checked[entry] = self._missing(entry) or self._crc_problem(entry)
        return self._checked[entry]

    def _crc_problem(self, entry: Entry) -> str | None:
        crc = 0
        for block in self._blocks(entry):
            crc = google_crc32c.extend(crc, block)
        return None if mask(crc) == entry.crc else f"its bytes in {self._file(entry)} do not have the CRC of the index"

    def _blocks(self, entry: Entry) -> Iterator[bytes]:
        with self.folder.open(self._file(entry), (entry.offset, entry.size)) as file:
            for at in range(0, entry.size, BLOCK_BYTES):
                yield pread(file, min(BLOCK_BYTES, entry.size - at), entry.offset + at)

    def _strings(self, name: str, entry: Entry) -> list[Any]:
        """Lengths, the CRC of the lengths, then the texts. The index's CRC goes over lengths of 4 bytes each."""
        data = b"".join(self._blocks(entry))
        count, at, lengths = math.prod(entry.shape), 0, []
        try:
            for _ in range(count):
                length, at = varint(data, at)
                lengths.append(length)
        except Damaged as error:
            self._refuse(name, str(error))
        plain = struct.pack(f"<{count}I", *(length & 0xFFFFFFFF for length in lengths))
        crc, texts = data[at : at + 4], data[at + 4 :]
        whole = masked_crc(crc + texts, google_crc32c.value(plain))
        if sum(lengths) != len(texts) or crc != struct.pack("<I", masked_crc(plain)) or whole != entry.crc:
            self._refuse(name, f"its bytes in {self._file(entry)} do not have the CRC of the index")
        ends = np.cumsum([0, *lengths])
        return [_text(texts[a:b]) for a, b in pairwise(ends)]

    def _file(self, entry: Entry) -> str:
        return f"{self.prefix}.data-{entry.shard:05d}-of-{self.shards:05d}"

    def _refuse(self, name: str, problem: str | None) -> None:
        if problem:
            raise CheckpointError(
                "a leaf cannot be read", leaves=[(name, problem)], where=self.folder.where(self.prefix)
            )


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def prefix_of(name: str) -> str | None:
    """The prefix of a bundle that a file belongs to, by the file's name."""
    shard = _SHARD.fullmatch(name)
    return shard[1] if shard else name.removesuffix(INDEX) if name.endswith(INDEX) else None


def is_table_file(folder: Folder, name: str) -> bool:
    """Whether a file ends as an index does: one that is called otherwise is a checkpoint of the V1 format."""
    size = folder.file_size(name) or 0
    if size < FOOTER_BYTES:
        return False
    with folder.open(name) as file:
        return is_table(pread(file, 8, size - 8))


def bundles(names: Iterable[str]) -> list[str]:
    """The prefixes of the bundles in a folder with these names."""
    found = list(names)
    with_shards = {match[1] for name in found if (match := _SHARD.fullmatch(name))}
    indexed = [name.removesuffix(INDEX) for name in found if name.endswith(INDEX)]
    return [prefix for prefix in indexed if prefix in with_shards]


def latest(folder: Folder, prefixes: Iterable[str]) -> str | None:
    """The bundle that a folder's text file `checkpoint` calls the latest; only the last name of its path counts."""
    data = folder.read_optional(_LIST, 1 << 20) if folder.file_size(_LIST) != 0 else None
    found = _LATEST.search((data or b"").decode("utf-8", "replace"))
    name = found[1].rpartition("/")[2] if found else None
    return name if name in set(prefixes) else None


def steps_of(prefixes: Iterable[str]) -> list[tuple[int, str]]:
    """The bundles of a run by their numbers (`model.ckpt-20`), in order; [] where one has none."""
    found = [(match and int(match[1]), prefix) for prefix in prefixes for match in [_STEP.fullmatch(prefix)]]
    return [] if any(number is None for number, _ in found) else sorted((int(n or 0), prefix) for n, prefix in found)


def open_bundle(folder: Folder, prefix: str) -> BundleSource:
    """The bundle of a prefix."""
    index = read_index(folder, prefix)
    paths = _paths(list(index.entries))
    specs = Specs.of([(paths[name], _spec(pieces)) for name, pieces in index.entries.items()])
    held = {format_path(paths[name]): pieces for name, pieces in index.entries.items()}
    broken = {format_path(paths[name]): told for name, told in index.broken.items()}
    notes = [f"{len(broken)} entries of the index make no sense: {', '.join(shorten(broken))}"] if broken else []
    return BundleSource(folder, prefix, index.shards, specs, held, broken, tuple(notes))


def _paths(names: list[str]) -> dict[str, KeyPath]:
    """The names cut at `/`; below another variable, the rest of a name is one key."""
    known = {tuple(name.split("/")) for name in names}
    out: dict[str, KeyPath] = {}
    for name in names:
        parts = tuple(name.split("/"))
        depth = next((k for k in range(1, len(parts)) if parts[:k] in known), len(parts))
        out[name] = (*parts[: depth - 1], "/".join(parts[depth - 1 :]))
    return out


def _spec(pieces: tuple[Entry, ...]) -> LeafSpec:
    if not pieces:
        return LeafSpec()
    first = pieces[0]
    stored = sum(piece.size for piece in pieces)
    if first.dtype == STRING:
        return LeafSpec(first.shape, kind="string", stored_bytes=stored)
    dtype = DTYPES[TF_DTYPES[first.dtype]]
    shape = first.shape
    if first.starts:
        ends = ([s + n for s, n in zip(p.starts, p.shape, strict=True)] for p in pieces)
        shape = tuple(map(max, zip(*ends, strict=True)))
    return LeafSpec(shape, dtype, kind_of(None, shape, dtype), stored, chunk_shape=shape)
