"""Convert: any source to any format on disk, in bounded memory."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal

from orbaxkit._checkpoint import Checkpoint
from orbaxkit._plan import open_source
from orbaxkit.errors import OrbaxkitError
from orbaxkit.execute.streaming import Progress, stream
from orbaxkit.formats import Source
from orbaxkit.formats.detect import absolute_path
from orbaxkit.formats.processes import Processes, together
from orbaxkit.formats.remote import is_remote
from orbaxkit.formats.sinks import Sink
from orbaxkit.planning import Plan, Transform, make_plan
from orbaxkit.planning.nodes import Read

Format = Literal["orbax", "safetensors"]
FORMATS = ("orbax", "safetensors")

# A part of a leaf that is given to a sink at once.
_PART_BYTES = 16 << 20

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def convert(
    source: Any,
    destination: str | os.PathLike[str],
    *transforms: Transform,
    format: Format | None = None,
    memory_limit: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    as_step: int | None = None,
    max_shard_size: int | str = "5GB",
    item: str | None = None,
    step: int | None = None,
) -> PurePath:
    """Write a checkpoint, or a tree in memory, as a new checkpoint: what `transforms` make of it, in bounded memory.

    Stored bytes are copied as they are where neither the values nor their chunks change. What lies beside the trees of
    a step (assets, metrics) comes along, unless the destination is one file or `item` is named. The destination appears
    whole or not at all, and the source is never modified.

    With `jax.distributed`, all processes call this with the same arguments, and each writes its share of the bytes to a
    folder that they share. One that fails, dies or hangs leaves nothing at the destination, and all others raise within
    half a minute. JAX then ends a program that still has a dead peer when it exits, and if process 0 died, at once:
    leave with `os._exit`, process 0 last.

    Args:
        source: a path, an opened checkpoint, a `CheckpointManager`, or a tree of arrays (params, a TrainState, …).
        format: "orbax", or "safetensors" (the default where the destination ends in `.safetensors`).
        memory_limit: bytes of arrays to hold at most, `"2GB"` too; by default 100 MB, or what the largest leaf needs.
        progress: called with the bytes done and the bytes in all.
        overwrite: replaces what stands at the destination, once the new one is whole.
        as_step: writes the step N of an Orbax run at the destination, as `N/default`.
        max_shard_size: the size at which safetensors files are split.

    Returns:
        The path that was written, a `pathlib.Path` or for a URL an `epath.Path`.

    Raises:
        CheckpointError: the source is damaged; the destination stands, has no room, or cannot hold a leaf.
        TransformError: a rule cannot be applied to these leaves.
        OrbaxkitError: a leaf needs more memory than the limit.

    >>> ok.convert("runs/pi0", "params.safetensors", ok.select("params/**")).name
    'params.safetensors'
    >>> ok.convert(state, "copy", memory_limit="1GB").name
    'copy'
    """
    with ExitStack() as undo, together() as processes:  # what is undone is undone when no process writes any more
        with processes.busy():
            opened, held, where = open_source(source, step, item)
            plan = make_plan(held.specs, *transforms)
            _refuse_overlap(where, destination)
            limit = None if memory_limit is None else size_of(memory_limit, "memory_limit")
            part_bytes = _PART_BYTES if limit is None else max(1, min(_PART_BYTES, limit // 8))
            shard_bytes = size_of(max_shard_size, "max_shard_size")
            beside = opened.layout.other_items if isinstance(opened, Checkpoint) and opened.item is None else {}
            sink = make_sink(destination, held, format, overwrite, as_step, shard_bytes, part_bytes, beside, processes)
            tied = ties(plan, held)
            _refuse_spread(plan, held)
        undo.callback(sink.abort)
        stream(plan, held, sink, memory_limit=limit, progress=progress, tied=tied, processes=processes)
        written = sink.close()
        undo.pop_all()
        return written


def make_sink(
    destination: str | os.PathLike[str],
    source: Source,
    format: str | None,
    overwrite: bool,
    as_step: int | None,
    max_shard_bytes: int,
    part_bytes: int,
    beside: Mapping[str, str] = MappingProxyType({}),
    processes: Processes | None = None,
) -> Sink:
    """The sink of a format, stored as the source is where the format has a choice."""
    from orbaxkit.formats.orbax_sink import OrbaxSink, settings_of

    chosen = format or format_of(destination)
    if chosen not in FORMATS:
        raise OrbaxkitError(f"there is no format {chosen!r}", hint=f"one of {', '.join(FORMATS)}")
    processes = processes or Processes()
    if chosen == "safetensors":
        if processes.count > 1:
            raise OrbaxkitError(
                f"safetensors files are written by one process, and these are {processes.count}",
                hint="convert in a program of its own, without jax.distributed: orbaxkit convert SRC DST",
            )
        if as_step is not None:
            raise OrbaxkitError("safetensors files have no steps", hint='leave as_step out, or format="orbax"')
        from orbaxkit.formats.safetensors_sink import SafetensorsSink

        return SafetensorsSink(
            destination, max_shard_bytes, overwrite, settings=settings_of(source), part_bytes=part_bytes, beside=beside
        )
    return OrbaxSink(destination, settings_of(source), as_step, overwrite, part_bytes, beside, processes)


def format_of(destination: str | os.PathLike[str]) -> str:
    """What a destination's name asks for."""
    return "safetensors" if os.fspath(destination).rstrip("/").endswith(".safetensors") else "orbax"


def ties(plan: Plan, source: Source) -> dict[str, str]:
    """Outputs that are the very array of an earlier one."""
    same: Mapping[str, str] = getattr(source, "tied", {})
    first: dict[str, str] = {}
    out = {}
    for name, output in plan.outputs.items():
        expr = output.expr
        if isinstance(expr, Read) and expr.source is None and expr.shape:
            origin = first.setdefault(same.get(expr.name, expr.name), name)
            if origin != name:
                out[name] = origin
    return out


def size_of(value: int | str, what: str) -> int:
    """Bytes: a number, or text like `5GB` (decimal) and `512MiB`."""
    if isinstance(value, int):
        if value > 0:
            return value
        raise OrbaxkitError(f"{what} is {value}, and must be at least one byte")
    found = _SIZE.fullmatch(value.strip())
    size = 0 if found is None else int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()])
    if size < 1:
        raise OrbaxkitError(f"{what}: {value!r} is no size", hint="like 5GB, 512MiB or a number of bytes")
    return size


def _refuse_overlap(source: str | None, destination: str | os.PathLike[str]) -> None:
    """Writing over the source, or over a folder that holds it, would lose it."""
    if source is None:
        return
    ours, theirs = _real(source), _real(absolute_path(destination))
    if ours == theirs or ours.startswith(theirs.rstrip("/") + "/"):
        raise OrbaxkitError(
            "the destination is the source, or holds it",
            where=theirs,
            hint="write somewhere else: nothing is changed in place",
        )


def _refuse_spread(plan: Plan, source: Source) -> None:
    """Arrays in memory of which this process has but a part: it could write no share of the others' bytes."""
    values = getattr(source, "values", {})
    spread = [name for name in plan.reads if getattr(values.get(name), "is_fully_addressable", True) is False]
    if spread:
        raise OrbaxkitError(
            "arrays lie partly on devices of other processes",
            leaves=[(name, "") for name in spread],
            hint="Orbax saves them, each process its own parts: ocp.StandardCheckpointer().save(path, tree);"
            " then convert(path, …)",
        )


def _real(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)
