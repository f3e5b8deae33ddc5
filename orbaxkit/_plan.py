"""Open anything that has leaves, and plan on it without reading them."""

import os
from typing import Any

from orbaxkit._checkpoint import Checkpoint, is_manager, open_checkpoint
from orbaxkit.errors import OrbaxkitError
from orbaxkit.formats import Source
from orbaxkit.planning import Plan, Transform, make_plan
from orbaxkit.specs import Specs


def plan(source: Any, *transforms: Transform, step: int | None = None, item: str | None = None) -> Plan:
    """Plan transforms, in order; nothing is read but metadata.

    What a transform does to params, it does to their optimizer slots too.

    Args:
        source: a path, an opened checkpoint or its `specs`, a `CheckpointManager`, or a tree of arrays.

    Raises:
        CheckpointError: the source cannot be opened.
        TransformError: a rule cannot be applied to these leaves.

    >>> print(ok.plan("runs/pi0", ok.select("params/head/**")))
    plan: 13 leaves -> 1, reads ... makes 32 B
    = params/head/kernel  bfloat16[8, 2]  32 B
    - opt_state/**  ...
    """
    specs = getattr(source, "specs", source)
    if not isinstance(specs, Specs) or step is not None or item is not None:
        specs = open_source(source, step, item)[1].specs
    return make_plan(specs, *transforms)


def open_source(source: Any, step: int | None = None, item: str | None = None) -> tuple[Any, Source, str | None]:
    """A path or a tree, opened: what was opened, where its values come from, and its path if it has one."""
    if isinstance(source, (str, os.PathLike, Checkpoint)) or is_manager(source):
        ckpt = open_checkpoint(source, step=step, item=item)
        return ckpt, ckpt.source, ckpt.path
    if step is not None or item is not None:
        raise OrbaxkitError("step= and item= choose from a checkpoint; this is a tree in memory")
    from orbaxkit.execute.memory import memory_source

    held = memory_source(source)
    return held, held, None
