"""What a stored optimizer state tells about a run: counts, frozen params, and moments that look wrong."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Source
from orbaxkit.optimizer.inference import Guess, infer
from orbaxkit.optimizer.stored import StoredState
from orbaxkit.paths import format_path
from orbaxkit.slots import EMA_NAMES, Slot, is_optimizer_name, strip_value
from orbaxkit.specs import LeafSpec, Specs

# Streaming through moments holds no more than this.
BLOCK_BYTES = 32 << 20
# A param whose moments are still zero by then gets no gradient.
MANY_STEPS = 10
# Whose inner states count something else than the steps of a run.
_SLOWER = {"MultiStepsState", "ApplyEvery"}


@dataclass(frozen=True)
class Observed:
    """One optimizer state: what its nodes were taken for, its counts, and the params that it has no moments for."""

    root: str
    guesses: tuple[Guess, ...]
    counts: Mapping[str, int]
    frozen: tuple[str, ...]
    oddities: tuple[str, ...] = ()


def observe(state: StoredState, source: Source, step: str | None, values: bool) -> Observed:
    """Look at a state. Counts are read, one number each; moments only with `values`, block by block."""
    counts, oddities = _counts(state, source)
    if step is not None and not any(slot.default.name in _SLOWER for slot in state.slots):
        oddities += _out_of_step(state, counts, step, source)
    if values:
        oddities += _odd_moments(state, source, counts)
    return Observed(format_path(state.root), infer(state)[1], counts, tuple(_frozen(state)), tuple(oddities))


def _counts(state: StoredState, source: Source) -> tuple[dict[str, int], list[str]]:
    counts, unread = {}, []
    for slot in state.slots:
        for name in _count_leaves(slot):
            stored = state.names[name]
            if state.specs[name].shape == () and state.specs[name].kind in ("array", "numpy", "scalar"):
                try:
                    counts[stored] = read_number(source, stored)
                except CheckpointError as error:
                    unread.append(f"{stored} cannot be read: {str(error).splitlines()[0]}")
    return counts, unread


def _count_leaves(slot: Slot) -> Iterator[str]:
    for field, names in slot.leaves.items():
        if slot.default.fields[field].role == "count":
            yield from names


def read_number(source: Source, name: str) -> int:
    """The one number of a 0-d leaf, whatever kind it is."""
    spec = source.specs[name]
    if spec.kind == "scalar" or spec.dtype is None:
        return int(np.asarray(source.value(name)).item())
    out = np.empty((), spec.dtype)
    source.read(name, (), out).result()
    return int(out)


def _out_of_step(state: StoredState, counts: Mapping[str, int], step: str, source: Source) -> list[str]:
    """Counts of moments that are not the step of the run: restarts, or steps that were skipped."""
    now = read_number(source, step)
    main = [state.names[name] for slot in state.slots if slot.mirrors for name in _count_leaves(slot)]
    return [f"{name} is {counts[name]:,}, {step} is {now:,}" for name in main if counts.get(name, now) != now]


def _frozen(state: StoredState) -> Iterator[str]:
    """The params that the state mirrors nothing for, where it mirrors others."""
    root, mirrored = state.params, {strip_value(path) for path in _mirrored(state)}
    if root is None or not mirrored:
        return
    for name, path in state.whole.paths.items():
        is_param = path[: len(root)] == root and path[: len(state.root)] != state.root
        if is_param and state.whole.leaves[name].parameters and strip_value(path[len(root) :]) not in mirrored:
            yield name


def _mirrored(state: StoredState) -> Iterator[tuple[str | int, ...]]:
    for slot in state.slots:
        for field, names in slot.mirrors.items():
            cut = 1 if slot.default.fields[field].layout == "per axis" else 0
            for name in names:
                rest = slot.param_of(state.specs, name)
                yield rest[: len(rest) - cut]


def _odd_moments(state: StoredState, source: Source, counts: Mapping[str, int]) -> Iterator[str]:
    """Moments that are not finite, and params whose moments are all zero although many steps were taken."""
    for slot in state.slots:
        reached = max((counts.get(state.names[name], 0) for name in _count_leaves(slot)), default=0)
        zero: dict[str, list[str]] = {}
        for field, names in slot.mirrors.items():
            for name in names:
                stored = state.names[name]
                is_finite, is_zero = _look(source, stored)
                if not is_finite:
                    yield f"{stored} holds values that are not finite"
                zero.setdefault(format_path(slot.param_of(state.specs, name)), []).extend([field] * is_zero)
        idle = [param for param, fields in zero.items() if len(fields) == len(slot.mirrors)]
        if reached >= MANY_STEPS:
            yield from (f"{param}: all moments are zero at count {reached:,}: it gets no gradient" for param in idle)


def _look(source: Source, name: str) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are zero; read block by block."""
    is_finite = is_zero = True
    for out in _blocks(source, name, source.specs[name]):
        # float32 holds what narrower floats hold; numpy's own wide types stay as they are.
        block = out if out.dtype.kind in "fciub" else out.astype(np.float32)
        is_finite = is_finite and bool(np.isfinite(block).all())
        is_zero = is_zero and not block.any()
    return is_finite, is_zero


def _blocks(source: Source, name: str, spec: LeafSpec) -> Iterator[np.ndarray]:
    if spec.dtype is None or spec.kind not in ("array", "numpy") or not spec.size:
        return
    if not spec.shape:
        whole = np.empty((), spec.dtype)
        source.read(name, (), whole).result()
        yield whole
        return
    row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
    rows = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, spec.shape[0], rows):
        stop = min(start + rows, spec.shape[0])
        out = np.empty((stop - start, *spec.shape[1:]), spec.dtype)
        source.read(name, (slice(start, stop), *(slice(0, size) for size in spec.shape[1:])), out).result()
        yield out


def averages_of(specs: Specs) -> list[str]:
    """The subtrees that hold averaged params, by name, outside optimizers."""
    found: dict[str, None] = {}
    for path in specs.paths.values():
        depth = next((k for k, s in enumerate(path) if s in EMA_NAMES or is_optimizer_name(s)), None)
        if depth is not None and path[depth] in EMA_NAMES:
            found[format_path(path[: depth + 1])] = None
    return list(found)
