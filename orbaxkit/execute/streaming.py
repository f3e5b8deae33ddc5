"""Run a plan from disk to disk: job by job under one byte budget, each needed value read and decoded once."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from orbaxkit.display.text import human_bytes
from orbaxkit.errors import CheckpointError, OrbaxkitError, TransformError
from orbaxkit.execute.budget import Budget
from orbaxkit.execute.encoded import Copies, announce_all, chunks_of, find_copies
from orbaxkit.execute.reading import check_readable
from orbaxkit.execute.sequential import SequentialSource
from orbaxkit.execute.sharing import Job, share, values_of
from orbaxkit.execute.windows import Arena, Window, cost_of, evaluate, windows_of
from orbaxkit.formats import Source, Value
from orbaxkit.formats.decoding import Undecodable
from orbaxkit.formats.processes import Processes
from orbaxkit.formats.sinks import SharedSink, Sink, Spans
from orbaxkit.formats.values import scalar_value
from orbaxkit.planning import Expr, Plan
from orbaxkit.planning.nodes import Affine, Cast, Constant, Fill, MergeLora, Read
from orbaxkit.specs import LeafSpec, Specs

# What is made at the same time where nothing else was asked for.
DEFAULT_BYTES = 96 << 20
WORKERS = 2

Progress = Callable[[int, int], object]


def output_specs(plan: Plan, source: Source) -> Specs:
    """What will be written: the plan's leaves, cut into chunks and sharded as what they are made of."""
    leaves = {name: _output_spec(name, plan, source) for name in plan.outputs}
    return Specs(leaves, plan.specs.paths, plan.containers)


def _output_spec(name: str, plan: Plan, source: Source) -> LeafSpec:
    spec, expr = plan.specs[name], plan.outputs[name].expr
    if spec.kind == "scalar" and spec.shape:  # a number that was reshaped
        spec = replace(spec, kind="array")
    if spec.kind in ("scalar", "string", "empty"):
        return replace(spec, stored_name=None)
    origin = _origin(name, expr, plan)
    chunks = chunks_of(expr, source)
    if isinstance(expr, Fill) and origin is not None:
        chunks = origin.chunk_shape
    fits = chunks is not None and len(chunks) == len(spec.data_shape)
    return replace(
        spec,
        stored_name=None,
        chunk_shape=chunks if fits else None,
        sharding=None if origin is None else origin.sharding,
    )


def _origin(name: str, expr: Expr, plan: Plan) -> LeafSpec | None:
    """The leaf that an output is element by element, whose sharding still holds; for a fill, the one it replaces."""
    while type(expr) in (Cast, Affine, MergeLora):
        expr = expr.children[0]
    if isinstance(expr, Read):
        return plan.source[expr.name] if expr.source is None else expr.source.source.specs[expr.name]
    found = plan.source.leaves.get(name) if isinstance(expr, Fill) else None
    return found if found is not None and found.shape == expr.shape else None


def stream(
    plan: Plan,
    source: Source,
    sink: Sink,
    *,
    memory_limit: int | None = None,
    progress: Progress | None = None,
    tied: Mapping[str, str] | None = None,
    processes: Processes | None = None,
) -> None:
    """Write every output of a plan to a sink that is not begun yet. The caller closes it, or aborts it on an error.

    At most `memory_limit` bytes of arrays are held at a time; without it, about 100 MB, or what one leaf needs.
    Of several `processes` each writes its share of the bytes, and the first one the scalars and strings.

    Raises:
        CheckpointError: data is missing or damaged; the destination stands, has no room or cannot hold a leaf.
        OrbaxkitError: a leaf needs more memory than the limit; another process failed or is lost.
    """
    processes = processes or Processes()
    with processes.busy():
        check_readable(plan, source)
        specs = output_specs(plan, source)
        run = _Run(plan, specs, SequentialSource(source), sink, memory_limit, progress, processes)
        sink.begin(specs, tied)
        for name, output in plan.outputs.items():
            if processes.is_first and specs[name].kind in ("scalar", "string"):
                sink.value(name, _value(output.expr, specs[name], source))
        jobs = run.jobs()
    run.execute(jobs)


def _value(expr: Expr, spec: LeafSpec, source: Source) -> Value:
    if isinstance(expr, Read):
        return (source if expr.source is None else expr.source.source).value(expr.name)
    if isinstance(expr, Fill) and not isinstance(expr.value, Constant):
        return expr.value
    host = evaluate([Window("", expr, tuple([(0, n) for n in expr.shape]), (), 0)], source)[0]
    return scalar_value(host)


@dataclass
class _Run:
    """One execution: its jobs, the bytes in use, what is done."""

    plan: Plan
    specs: Specs
    source: SequentialSource
    sink: Sink
    limit: int | None
    progress: Progress | None
    processes: Processes
    _budget: Budget = field(init=False)
    _done: int = 0
    _total: int = 0
    _arenas: list[Arena] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._budget = Budget(self.limit or DEFAULT_BYTES)

    @property
    def _share(self) -> int:
        """What one window may take."""
        return (self.limit or DEFAULT_BYTES) // WORKERS

    def jobs(self) -> list[Job]:
        """All jobs, or this process's share of them, largest first."""
        jobs: Sequence[Job] = list(self._jobs())
        if self.processes.count > 1:
            shares = share(jobs, self.processes.count, self._shared_sink.stored_values)
            self.processes.agree(shares.digest)
            jobs = shares.jobs[self.processes.index]
            self._shared_sink.assign(values_of(jobs, self._shared_sink.stored_values))
        return sorted(jobs, key=lambda job: -job.work_bytes)

    @property
    def _shared_sink(self) -> SharedSink:
        if not isinstance(self.sink, SharedSink):
            raise ValueError("one process fills this sink")
        return self.sink

    def execute(self, jobs: Sequence[Job]) -> None:
        """Do the jobs on a few threads; the first error ends all of them."""
        self._total = sum(job.work_bytes for job in jobs)
        announce_all(copies for job in jobs for copies in job.copies.values())
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="orbaxkit-stream") as pool:
            try:
                self._await([pool.submit(self._work, job) for job in jobs])
            except BaseException:
                self._budget.stop()
                with self.processes.busy():
                    pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                self.source.finish()

    def _await(self, futures: Sequence[Future]) -> None:
        """Report from this thread, so that what the caller's function does is not done twice at a time."""
        pending: set[Future] = set(futures)
        while True:
            self._report()
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not pending:
                self._report()
                return

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self._done, self._total)
        self.processes.alive(self._done)

    def _jobs(self) -> Iterator[Job]:
        """Copies one by one, groups of outputs that share what they read, and many small groups together."""
        small: list[str] = []
        small_bytes = 0
        too_small: list[tuple[str, str]] = []
        for group in self.plan.groups:
            copies, rest = self._split(group)
            for name, found in copies.items():
                yield Job((), {name: found}, found.nbytes)
            size = sum(self.specs[name].nbytes for name in rest)
            if not rest:
                continue
            too_small += self._beyond_limit(rest)
            if size > self._share // 16:
                yield Job(tuple(rest), {}, size)
                continue
            small += rest
            small_bytes += size
            if small_bytes > self._share // 8:
                yield Job(tuple(small), {}, small_bytes)
                small, small_bytes = [], 0
        if small:
            yield Job(tuple(small), {}, small_bytes)
        if too_small:
            raise OrbaxkitError(
                f"{human_bytes(self.limit or 0)} of memory are too little",
                leaves=too_small,
                hint="give more: memory_limit=…, --memory-limit",
            )

    def _split(self, group: Sequence[str]) -> tuple[dict[str, Copies], list[str]]:
        copies: dict[str, Copies] = {}
        rest = []
        for name in group:
            spec = self.specs[name]
            if spec.kind in ("scalar", "string", "empty"):
                continue
            found = find_copies(self.plan.outputs[name].expr, spec.chunk_shape, self.source)
            if found is not None and self.sink.accepts_encoded(name, found.array):
                copies[name] = found
            else:
                rest.append(name)
        return copies, rest

    def _beyond_limit(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Outputs of which even the smallest part takes more than may be used."""
        if self.limit is None:
            return
        for name in names:
            first = next(self.sink.parts(name), None)
            expr = self.plan.outputs[name].expr
            cost = 0 if first is None else cost_of(expr, first[: len(expr.shape)], self.source)
            if cost > self.limit:
                yield name, f"needs {human_bytes(cost)}"

    def _work(self, job: Job) -> None:
        for name, found in job.copies.items():
            try:
                self._copy(name, found)
            except Undecodable as error:
                raise CheckpointError("a leaf cannot be copied", leaves=[(name, str(error))]) from None
        if job.names:
            self._make(job)

    def _copy(self, name: str, found: Copies) -> None:
        for key, value in found.encoded():
            self._budget.check()
            self.sink.write_encoded(name, key, value)
            self._advance(value.length)

    def _make(self, job: Job) -> None:
        arena = self._arenas.pop() if self._arenas else Arena()
        for batch in _batches(self._windows(job), self._share):
            cost = sum(window.cost for window in batch)
            with self._budget.of(cost):
                arena.reset(min(cost, self._share))
                for window, array in zip(batch, _evaluate(batch, self.source, arena), strict=True):
                    self._write(window, array)
        self._arenas.append(arena)

    def _windows(self, job: Job) -> Iterator[Window]:
        most = None if self.limit is None else self._share
        for name in job.names:
            expr = self.plan.outputs[name].expr
            for data_spans in self._parts(job, name):
                parts = (spans[: len(expr.shape)] for spans in data_spans)
                yield from windows_of(name, expr, parts, self.source, most)

    def _parts(self, job: Job, name: str) -> Iterator[Iterator[Spans]]:
        """The parts of a leaf; of one that is shared among processes, those of each value that is made here."""
        if name not in job.only:
            yield self.sink.parts(name)
        for key in job.only.get(name, ()):
            yield self._shared_sink.parts_of(name, key)

    def _write(self, window: Window, array: np.ndarray) -> None:
        words = tuple([(0, n) for n in window.expr.element.words])
        for spans, view in window.views(array):
            self._budget.check()
            self.sink.write(window.name, spans + words, view)
            self._advance(view.nbytes)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count


def _evaluate(batch: Sequence[Window], source: Source, arena: Arena) -> list[np.ndarray]:
    """The windows' arrays; what a value cannot be made of is an error with the leaves' names."""
    try:
        return evaluate(batch, source, arena.empty)
    except TransformError as error:
        names = dict.fromkeys(window.name for window in batch)
        if len(names) == 1:
            raise TransformError(str(error).split("\n")[0], leaves=[(name, "") for name in names]) from None
    return [array for window in batch for array in _evaluate([window], source, Arena())]


def _batches(windows: Iterator[Window], most: int) -> Iterator[list[Window]]:
    """Windows that fit together; one at least."""
    batch: list[Window] = []
    cost = 0
    for window in windows:
        if batch and (cost + window.cost > most or window.is_alone or batch[-1].is_alone):
            yield batch
            batch, cost = [], 0
        batch.append(window)
        cost += window.cost
    if batch:
        yield batch
