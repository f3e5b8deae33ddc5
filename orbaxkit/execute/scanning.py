"""Look at every value of outputs once, slab by slab, without keeping any."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from orbaxkit.execute.streaming import WORKERS
from orbaxkit.execute.windows import Window, evaluate, is_sequential, slabs, windows_of
from orbaxkit.formats import Source
from orbaxkit.planning import Plan

T = TypeVar("T")

# Small outputs are looked at together up to this, large ones in windows of about this.
BATCH_BYTES = 32 << 20


def has_bytes(plan: Plan, name: str) -> bool:
    """Whether an output is an array of which there are bytes to look at."""
    spec = plan.specs[name]
    return spec.kind in ("array", "numpy", "key") and spec.dtype is not None and spec.nbytes > 0


def jobs_of(
    plan: Plan, names: Iterable[str], source: Source, beside: tuple[Plan, Source] | None = None
) -> Iterator[list[Window]]:
    """Windows to be made one after the other: those of one large output, or of several small ones.

    Windows are small where this plan, and the one beside it, can be read in order; else a window is a whole output.
    """
    small: list[Window] = []
    for name in names:
        plans = [(plan, source)] + ([] if beside is None else [beside])
        in_order = all(is_sequential(one.outputs[name].expr, held) for one, held in plans)
        spec, expr = plan.specs[name], plan.outputs[name].expr
        parts = (spans[: len(expr.shape)] for spans in slabs(spec))
        windows = list(windows_of(name, expr, parts, source, BATCH_BYTES if in_order else None))
        if len(windows) > 1 or windows[0].cost > BATCH_BYTES // 4:
            yield windows
            continue
        small += windows
        if sum(window.cost for window in small) > BATCH_BYTES:
            yield small
            small = []
    if small:
        yield small


def groups(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Windows of one job that are made at once: all of several small outputs, else one at a time."""
    if len({window.name for window in windows}) > 1 and not any(window.is_alone for window in windows):
        yield list(windows)
        return
    for window in windows:
        yield [window]


def scan(plan: Plan, source: Source, names: Iterable[str], look: Callable[[list[Window], Source], T]) -> Iterator[T]:
    """What `look` makes of each job's windows, in order, on a few threads."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="orbaxkit-scan") as pool:
        pending: list = []
        for job in jobs_of(plan, names, source):
            pending.append(pool.submit(look, job, source))
            if len(pending) > WORKERS:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()


def same_window(window: Window, plan: Plan) -> Window:
    """The window of another plan's output of the same name."""
    return Window(window.name, plan.outputs[window.name].expr, window.box, window.parts, window.cost)


def contents(windows: Sequence[Window], source: Source) -> Iterator[tuple[Window, np.ndarray]]:
    """Each window with its array."""
    for group in groups(windows):
        yield from zip(group, evaluate(group, source), strict=True)
