"""Read safetensors: a file, or a folder of files with or without an index, by slice and as bytes are asked for.

Without orbaxkit's own sidecar, paths are the tensors' names split at dots, as Hugging Face joins them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError, shorten
from orbaxkit.formats import Done, Pending, Value
from orbaxkit.formats.files import Folder, check_name, pread
from orbaxkit.formats.flat import BLOCK_BYTES, read_region
from orbaxkit.formats.safetensors_header import Header, Tensor, name_problem, read_header
from orbaxkit.formats.safetensors_sidecar import KEY, Entry, Sidecar, decode
from orbaxkit.formats.structure import MAX_DEPTH, from_names, in_tree_order
from orbaxkit.formats.values import scalar_value
from orbaxkit.specs import Kind, LeafSpec, Specs

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_NO_TIES = ("format",)  # the library says there for which framework a file is; a tensor may have that name


@dataclass(frozen=True, slots=True)
class Held:
    """Where a leaf's value is: a tensor, or a text. `twin` is the leaf's own tensor beside the one it is tied to."""

    tensor: Tensor | None = None
    text: str | None = None
    twin: Tensor | None = None
    problem: str | None = None


@dataclass(frozen=True)
class SafetensorsSource:
    """A `Source` over safetensors files. `tied` says of which other leaf a leaf is the same array."""

    folder: Folder
    specs: Specs
    held: Mapping[str, Held]
    tied: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = None
    _checked: dict[str, str | None] = field(default_factory=dict, repr=False)

    @cached_property
    def orbax_settings(self) -> Any:
        """How the Orbax item stored its arrays that these files were made of, if they were."""
        from orbaxkit.formats.orbax_sink import OrbaxSettings

        driver, codec = self.settings.get("driver"), self.settings.get("codec")
        if driver not in ("zarr", "zarr3") or codec not in ("zstd", "raw"):
            return None
        return OrbaxSettings(driver, codec, self.settings.get("custom_metadata"))

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Read a region of a leaf into `out`."""
        tensor, problem = self.held[name].tensor, self._problem(name)
        if problem or tensor is None:
            raise CheckpointError(
                "a leaf cannot be read", leaves=[(name, problem or "it is no array")], where=self.folder.path
            )
        with self.folder.open(tensor.file, (tensor.offset, tensor.nbytes)) as file:
            spans = [(part.start, part.stop) for part in index]
            try:
                read_region(file, tensor.offset, tensor.shape, spans, out)
            except EOFError:
                raise CheckpointError(
                    "a leaf cannot be read", leaves=[(name, f"{tensor.file} is cut short")], where=self.folder.path
                ) from None
        return Done()

    def value(self, name: str) -> Value:
        """A string, or a number."""
        held = self.held[name]
        if held.text is not None:
            return held.text
        out = np.empty((), self.specs[name].dtype)
        self.read(name, (), out).result()
        return scalar_value(out)

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Missing files and tensors, files that are cut short, tied leaves that are not the same."""
        return [(name, problem) for name in names if (problem := self._problem(name))]

    def _problem(self, name: str) -> str | None:
        if name not in self._checked:
            held = self.held[name]
            problem = held.problem or (held.tensor.problem if held.tensor else None)
            self._checked[name] = problem or self._tie_problem(name, held)
        return self._checked[name]

    def _tie_problem(self, name: str, held: Held) -> str | None:
        if held.tensor is None or held.twin is None or _same_bytes(self.folder, held.tensor, held.twin):
            return None
        other = self.tied.get(name, self.specs[name].stored_name)
        return held.twin.problem or f"it is noted as tied to {other}, and both are here with different values"


def is_safetensors(names: Iterable[str]) -> bool:
    """Whether a folder with these names holds safetensors files."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def open_safetensors(folder: Folder, name: str = "") -> SafetensorsSource:
    """Open a file of a folder, or all that are in it."""
    if not name:
        return _open_folder(folder)
    header = read_header(folder, name)
    return _source(folder, header.tensors, header.metadata, (), folder.where(name))


def _open_folder(folder: Folder) -> SafetensorsSource:
    names = [name for name, is_folder in folder.names().items() if not is_folder]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(f"several indexes are here: {', '.join(shorten(indexes))}", where=folder.path)
    if indexes:
        return _open_indexed(folder, indexes[0])
    headers = {name: read_header(folder, name) for name in names if name.endswith(SUFFIX)}
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        twice = next((key for key in header.tensors if key in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{file} and {tensors[twice].file} both hold {twice!r}",
                where=folder.path,
                hint=f"open one of them: {folder.where(file)}",
            )
        tensors |= header.tensors
    return _source(folder, tensors, _metadata(headers.values()), (), folder.path)


def _metadata(headers: Iterable[Header]) -> dict[str, str]:
    """The files' own metadata together; the first file's entries count."""
    out: dict[str, str] = {}
    for header in headers:
        out = {**header.metadata, **out}
    return out


def _open_indexed(folder: Folder, index: str) -> SafetensorsSource:
    found = folder.read_json(index)
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} holds no weight_map", where=folder.where(index))
    files = sorted({check_name(file, folder.where(index)) for file in places.values()})
    missing = {file for file in files if not folder.has_file(file)}
    headers = {file: read_header(folder, file) for file in files if file not in missing}
    tensors = {name: _indexed(name, file, headers) for name, file in places.items()}
    extra = [name for header in headers.values() for name in header.tensors if name not in places]
    notes = [f"{len(extra)} tensors are in no index and left out: {', '.join(shorten(extra))}"] if extra else []
    notes += [f"{len(missing)} files are missing: {', '.join(shorten(sorted(missing)))}"] if missing else []
    notes += _listed_elsewhere(places, headers)
    return _source(folder, tensors, _metadata(headers.values()), tuple(notes), folder.where(index))


def _listed_elsewhere(places: Mapping[str, str], headers: Mapping[str, Header]) -> list[str]:
    """What the index decides: tensors that another file holds, too."""
    found = [(n, file) for file, header in headers.items() for n in header.tensors if places.get(n, file) != file]
    lines = [f"{name} of {places[name]} is read, not that of {file}: so the index says" for name, file in found]
    return shorten(lines)


def _indexed(name: str, file: str, headers: Mapping[str, Header]) -> Tensor | str:
    """A tensor, or why there is none where the index says."""
    if file not in headers:
        return f"{file} is missing"
    return headers[file].tensors.get(name) or f"{file} does not hold {name!r}"


def _source(
    folder: Folder,
    tensors: Mapping[str, Tensor | str],
    metadata: Mapping[str, str],
    notes: tuple[str, ...],
    where: str,
) -> SafetensorsSource:
    text = metadata.get(KEY)
    sidecar = _inferred(tensors, metadata, where) if text is None else decode(text, where)
    specs = _specs(sidecar, tensors, where)
    entries = dict(zip(specs.leaves, sidecar.entries, strict=True))
    by_tensor = {entry.tensor: name for name, entry in entries.items() if entry.tensor and not entry.tied}
    held = {name: _held(entry, tensors) for name, entry in entries.items()}
    tied = {
        name: by_tensor[entry.tensor] for name, entry in entries.items() if entry.tied and entry.tensor in by_tensor
    }
    known = {".".join(map(str, entry.path)) for entry in sidecar.entries if entry.tied}
    known |= {entry.tensor for entry in sidecar.entries if entry.tensor}
    unknown = [name for name in tensors if name not in known]
    if unknown:
        notes = (*notes, f"{len(unknown)} tensors are not in the tree: {', '.join(shorten(unknown))}")
    ties = tuple(f"{name} is tied to {other}" for name, other in tied.items())
    return SafetensorsSource(
        folder,
        specs,
        held,
        tied,
        sidecar.settings,
        notes=(*notes, *shorten(ties)),
        writer="orbaxkit" if text is not None else "safetensors",
    )


def _specs(sidecar: Sidecar, tensors: Mapping[str, Tensor | str], where: str) -> Specs:
    try:
        return Specs.of([(entry.path, _spec(entry, tensors)) for entry in sidecar.entries], sidecar.containers)
    except CheckpointError as error:
        raise CheckpointError("its names make no tree", leaves=error.leaves, where=where) from None


def _inferred(tensors: Mapping[str, Tensor | str], metadata: Mapping[str, str], where: str) -> Sidecar:
    """Names split at dots; ties as the safetensors library notes them: the name left out -> the one that is kept."""
    noted = {name: kept for name, kept in metadata.items() if name not in _NO_TIES and not name_problem(name)}
    ties = {name: kept for name, kept in noted.items() if kept in tensors and name != kept}
    deep = [(name[:80], "") for name in [*tensors, *ties] if name.count(".") >= MAX_DEPTH]
    if deep:
        raise CheckpointError(f"names have more than {MAX_DEPTH} parts", leaves=deep, where=where)
    leaves = in_tree_order(from_names([*tensors, *(name for name in ties if name not in tensors)]).leaves)
    return Sidecar(
        tuple(
            [
                Entry(leaf.path, "array", tensor=ties.get(leaf.name, leaf.name), tied=leaf.name in ties)
                for leaf in leaves
            ]
        )
    )


def _spec(entry: Entry, tensors: Mapping[str, Tensor | str]) -> LeafSpec:
    if entry.kind == "empty":
        return LeafSpec(kind="empty", empty=entry.empty)
    if entry.kind == "string":
        return LeafSpec(kind="string", stored_bytes=len((entry.text or "").encode("utf-8", "surrogatepass")))
    spec = LeafSpec(kind=entry.kind, sharding=entry.sharding, stored_name=entry.tensor)
    tensor = tensors.get(entry.tensor or "")
    if not isinstance(tensor, Tensor):
        return spec
    kind: Kind = "numpy" if entry.kind == "scalar" and tensor.shape else entry.kind
    chunks, shards = [_rank(sizes, tensor.shape) for sizes in (entry.chunk_shape, entry.shard_shape)]
    spec = replace(spec, kind=kind, shape=tensor.shape, dtype=tensor.dtype, chunk_shape=chunks, shard_shape=shards)
    return replace(spec, stored_bytes=tensor.nbytes)


def _rank(sizes: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return sizes if sizes is not None and len(sizes) == len(shape) and all(sizes) else None


def _held(entry: Entry, tensors: Mapping[str, Tensor | str]) -> Held:
    if entry.kind in ("string", "empty"):
        return Held(text=entry.text)
    tensor = tensors.get(entry.tensor or "", f"the tensor {entry.tensor!r} is missing")
    if isinstance(tensor, str):
        return Held(problem=tensor)
    twin = tensors.get(".".join(map(str, entry.path))) if entry.tied else None
    return Held(tensor, twin=twin if isinstance(twin, Tensor) else None)


def _same_bytes(folder: Folder, a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype) or b.problem:
        return False
    pairs = zip(_blocks(folder, a), _blocks(folder, b), strict=True)
    return all(left == right for left, right in pairs)


def _blocks(folder: Folder, tensor: Tensor) -> Iterator[bytes]:
    with folder.open(tensor.file, (tensor.offset, tensor.nbytes)) as file:
        for at in range(0, tensor.nbytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, tensor.nbytes - at)
            yield pread(file, size, tensor.offset + at)
