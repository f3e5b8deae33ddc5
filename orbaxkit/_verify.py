"""Verify: is every byte of a checkpoint there, whole and decodable, and is it what it was?"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orbaxkit._checkpoint import Checkpoint, open_checkpoint
from orbaxkit.display.text import align, counted, human_bytes
from orbaxkit.errors import CheckpointError, OrbaxkitError, shown
from orbaxkit.execute.scanning import contents, has_bytes, scan
from orbaxkit.execute.sequential import SequentialSource
from orbaxkit.execute.windows import Window
from orbaxkit.formats import Source
from orbaxkit.formats.files import LFS_HEAD, LFS_HINT, LFS_PROBLEM, Folder
from orbaxkit.planning import Plan
from orbaxkit.specs import LeafSpec

Finding = tuple[str, str]

MANIFEST_VERSION = 1
_SHOWN = 40
_LFS_BYTES = 1024  # a pointer is shorter

# What stock Orbax, or a reader, cannot do without files that are not needed for the values.
_OPTIONAL = {
    "_METADATA": "without it container types, scalars and strings are guessed from names",
    "_sharding": "without it Orbax restores jax arrays only into a target that names shardings",
    "array_metadatas": "without it typed PRNG keys come back as plain uint32 arrays",
}
_OPTIONAL_IN_STEP = {"_CHECKPOINT_METADATA": "without it Orbax has to be told each item's type"}


@dataclass(frozen=True)
class Verification:
    """What was found. True where nothing is wrong. Prints well.

    `problems` are `(leaf or file, what is wrong)`; `values` what `values=True` found that is legal but odd.
    """

    path: str
    leaves: int
    nbytes: int  # that were decoded
    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    values: tuple[Finding, ...] | None = None
    hashes: str = ""  # what became of the manifest

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [shown(self.path)]
        lines += _rows(f"damaged: {counted(len(self.problems), 'finding')}", self.problems)
        lines += _rows("values worth a look", self.values or ())
        lines += [f"note: {shown(note)}" for note in self.notes]
        lines += [self.hashes] if self.hashes else []
        if self:
            lines.append(f"whole: {counted(self.leaves, 'leaf', 'leaves')}, {human_bytes(self.nbytes)} decoded")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "is_ok": bool(self),
            "leaves": self.leaves,
            "decoded_bytes": self.nbytes,
            "problems": [{"path": name, "problem": problem} for name, problem in self.problems],
            "values": None if self.values is None else [{"path": name, "finding": told} for name, told in self.values],
            "notes": list(self.notes),
            "hashes": self.hashes or None,
        }


def _rows(title: str, findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    rows = [(shown(name) or "(root)", shown(problem)) for name, problem in findings[:_SHOWN]]
    more = [f"and {len(findings) - _SHOWN:,} more"] if len(findings) > _SHOWN else []
    return [title, *(f"  {line}" for line in (*align(rows, [False, False]), *more))]


def verify(
    path: Any, *, values: bool = False, hash: bool = False, step: int | None = None, item: str | None = None
) -> Verification:
    """Read all of a checkpoint and say, leaf by leaf, what is missing, cut short or cannot be decoded.

    Orbax keeps no checksums of array bytes: a flipped bit reads back silently wrong. `hash` writes a manifest of
    checksums beside the checkpoint (`PATH.orbaxkit-hashes.json`); wherever one stands, it is checked.

    Args:
        values: also look for NaN and infinities, which are problems, and for constant arrays, which may be.
        hash: writes the manifest, over an old one too, if everything is whole.

    Raises:
        CheckpointError: it cannot be opened at all.

    >>> assert ok.verify("runs/pi0")
    """
    ckpt = open_checkpoint(path, step=step, item=item)
    source = ckpt.source
    broken = dict(source.problems(ckpt.specs))
    manifest = _manifest(ckpt)
    looks = _Looks(values, hash or manifest.exists)
    seen = _look_at_all(source, [name for name in ckpt.specs if name not in broken], looks)
    problems = [*broken.items(), *((name, look.problem) for name, look in seen.items() if look.problem)]
    problems += [(name, told) for name, look in seen.items() if (told := look.nonfinite)]
    problems += _files(ckpt)
    hashes, changed = _hashes(manifest, ckpt, seen, hash and not problems) if looks.hashes else ("", [])
    problems += changed
    order = {name: at for at, name in enumerate(ckpt.specs)}
    return Verification(
        ckpt.path,
        leaves=sum(spec.kind != "empty" for spec in ckpt.specs.values()),
        nbytes=sum(look.nbytes for look in seen.values()),
        problems=tuple(sorted(problems, key=lambda found: order.get(found[0], len(order)))),
        notes=tuple(dict.fromkeys((*ckpt.notes, *_missing_files(ckpt)))),
        values=tuple(_constants(ckpt.specs, seen)) if values else None,
        hashes=hashes,
    )


@dataclass(frozen=True, slots=True)
class _Looks:
    values: bool
    hashes: bool


@dataclass(slots=True)
class _Look:
    """What reading one leaf gave."""

    nbytes: int = 0
    problem: str = ""
    digest: str = ""
    nan: int = 0
    infinite: int = 0
    constant: str | None = None  # its one value

    @property
    def nonfinite(self) -> str:
        """How many elements are no finite numbers."""
        told = [f"{count:,} {name}" for count, name in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        return ", ".join(told)


def _look_at_all(source: Source, names: Sequence[str], looks: _Looks) -> dict[str, _Look]:
    plan = Plan.identity(source.specs)
    sequential = SequentialSource(source)
    out: dict[str, _Look] = {}
    arrays = [name for name in names if has_bytes(plan, name)]
    for found in scan(plan, sequential, arrays, lambda job, held: _look_at(job, held, looks)):
        out |= found
    sequential.finish()
    for name in names:
        if source.specs[name].kind in ("scalar", "string"):
            out[name] = _look_at_number(source, name, looks)
    return out


def _look_at(job: list[Window], source: Source, looks: _Looks) -> dict[str, _Look]:
    """Look at the windows of a job; where several leaves are read together and one fails, at each by itself."""
    names = list(dict.fromkeys(window.name for window in job))
    observers = {name: _Observer(looks) for name in names}
    try:
        for window, array in contents(job, source):
            observers[window.name].add(array)
    except OrbaxkitError as error:
        if len(names) == 1:
            return {names[0]: _Look(problem=_reason(error))}
        found: dict[str, _Look] = {}
        for name in names:
            found |= _look_at([window for window in job if window.name == name], source, looks)
        return found
    return {name: observer.look() for name, observer in observers.items()}


def _reason(error: OrbaxkitError) -> str:
    leaves = getattr(error, "leaves", ())
    return leaves[0][1] if leaves and leaves[0][1] else str(error).split("\n")[0]


def _look_at_number(source: Source, name: str, looks: _Looks) -> _Look:
    try:
        value = source.value(name)
    except OrbaxkitError as error:
        return _Look(problem=_reason(error))
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return _Look(len(data), digest=hashlib.blake2b(data, digest_size=16).hexdigest())
    observer = _Observer(_Looks(looks.values, looks.hashes))
    observer.add(np.asarray(value))
    look = observer.look()
    look.constant = None
    return look


@dataclass
class _Observer:
    """Looks at the parts of a leaf as they come, in C order."""

    looks: _Looks
    _nbytes: int = 0
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _nan: int = 0
    _infinite: int = 0
    _first: bytes | None = None
    _is_constant: bool = True

    def add(self, array: np.ndarray) -> None:
        """The next part."""
        self._nbytes += array.nbytes
        if self.looks.hashes:
            self._hash.update(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        if self.looks.values and array.size:
            self._observe(array)

    def _observe(self, array: np.ndarray) -> None:
        first = np.ascontiguousarray(array.reshape(-1)[:1]).tobytes()
        self._first = first if self._first is None else self._first
        self._is_constant = self._is_constant and first == self._first and bool((array == array.reshape(-1)[0]).all())
        if array.dtype.kind in "biu" or "int" in array.dtype.name:
            return
        wide = array if array.dtype.kind in "fc" else array.astype(np.float32)
        finite = np.isfinite(wide)
        if not finite.all():
            nan = int(np.isnan(wide).sum())
            self._nan += nan
            self._infinite += int(finite.size - finite.sum()) - nan

    def look(self) -> _Look:
        """What was seen."""
        is_constant = self.looks.values and self._is_constant and self._first is not None
        return _Look(
            self._nbytes,
            digest=self._hash.hexdigest() if self.looks.hashes else "",
            nan=self._nan,
            infinite=self._infinite,
            constant=None if not is_constant or self._first is None else self._first.hex(),
        )


def _constants(specs: Mapping[str, LeafSpec], seen: Mapping[str, _Look]) -> Iterator[Finding]:
    """Arrays of several elements that are all one value."""
    for name, look in seen.items():
        spec = specs[name]
        if look.constant is not None and spec.kind in ("array", "numpy") and spec.size > 1 and spec.dtype is not None:
            value = np.frombuffer(bytes.fromhex(look.constant), spec.dtype)[0]
            yield name, f"all {spec.size:,} elements are {value}"


def _files(ckpt: Checkpoint) -> Iterator[Finding]:
    """Files that Git LFS left pointers for, and other items that are empty."""
    for folder in _roots(ckpt):
        for name, size in sorted(folder.sizes_below("").items()):
            if size is not None and size < _LFS_BYTES and _starts_with(folder, name, LFS_HEAD):
                yield name, f"{LFS_PROBLEM} ({LFS_HINT})"


def _starts_with(folder: Folder, name: str, head: bytes) -> bool:
    try:
        with folder.open(name) as file:
            return file.read(len(head)) == head
    except CheckpointError:
        return False


def _roots(ckpt: Checkpoint) -> list[Folder]:
    items = list(ckpt.layout.items.values()) if ckpt.item is None else [ckpt.layout.items[ckpt.item]]
    others = [] if ckpt.item is not None else list(ckpt.layout.other_items.values())
    folders = map(ckpt.layout.folder_at, (*items, *others))
    return [folder for folder in folders if folder.kind() == "folder"]


def _missing_files(ckpt: Checkpoint) -> Iterator[str]:
    """What a missing file costs that no value needs."""
    if ckpt.format != "orbax":
        return
    for path in ckpt.layout.items.values():
        names = ckpt.layout.folder_at(path).names()
        kinds = {spec.kind for spec in ckpt.specs.values()}
        for name, cost in _OPTIONAL.items():
            if name not in names and (name == "_METADATA" or not kinds.isdisjoint(("array", "key"))):
                yield f"{name} is missing: {cost}"
    if ckpt.layout.step_name is not None and ckpt.layout.root is not None:
        folder = ckpt.layout.folder_at(f"{ckpt.layout.root}/{ckpt.layout.step_name}")
        for name, cost in _OPTIONAL_IN_STEP.items():
            if folder.kind() == "folder" and not folder.has_file(name):
                yield f"{name} is missing: {cost}"


@dataclass(frozen=True)
class _Manifest:
    """Where the checksums of a checkpoint are kept: beside its step, item or file."""

    folder: Folder
    name: str

    @property
    def path(self) -> str:
        return self.folder.where(self.name)

    @property
    def exists(self) -> bool:
        return self.folder.has_file(self.name)


def _manifest(ckpt: Checkpoint) -> _Manifest:
    layout = ckpt.layout
    path = layout.path
    if layout.steps and layout.root is not None:
        path = f"{layout.root}/{layout.step_name}"
    suffix = "" if ckpt.item is None else f".{ckpt.item}"
    beside = layout.folder_at(path)
    return _Manifest(beside.parent, f"{beside.name}{suffix}.orbaxkit-hashes.json")


def _hashes(
    manifest: _Manifest, ckpt: Checkpoint, seen: Mapping[str, _Look], is_written: bool
) -> tuple[str, list[Finding]]:
    found = {name: _entry(ckpt.specs[name], look) for name, look in seen.items() if look.digest}
    if is_written:
        document = json.dumps({"version": MANIFEST_VERSION, "leaves": found}, indent=1)
        manifest.folder.write(manifest.name, document.encode())
        return f"checksums of {counted(len(found), 'leaf', 'leaves')} written to {manifest.path}", []
    if not manifest.exists:
        return "no checksums were written: the checkpoint is damaged", []
    known = _read_manifest(manifest)
    changed = [
        (name, told) for name in known if (told := _change(known[name], found.get(name), name in ckpt.specs.leaves))
    ]
    changed += [(name, f"is not in {manifest.name}") for name in found if name not in known]
    return f"checked against {counted(len(known), 'checksum')} in {manifest.path}", changed


def _entry(spec: LeafSpec, look: _Look) -> dict[str, Any]:
    return {"dtype": spec.dtype_name, "shape": list(spec.shape), "blake2b": look.digest}


def _change(known: Mapping[str, Any], found: Mapping[str, Any] | None, is_here: bool) -> str:
    if found is None:
        return "" if is_here else "is gone: it has a checksum, and is not here"
    if found == known:
        return ""
    same = [key for key in ("dtype", "shape") if found[key] != known.get(key)]
    return f"its {' and '.join(same)} changed" if same else "its bytes changed since the checksums were written"


def _read_manifest(manifest: _Manifest) -> dict[str, Any]:
    data = manifest.folder.read_json(manifest.name)
    leaves = data.get("leaves") if isinstance(data, dict) else None
    if not isinstance(leaves, dict) or not all(isinstance(entry, dict) for entry in leaves.values()):
        raise CheckpointError("these are no checksums of ours", where=manifest.path)
    return leaves
