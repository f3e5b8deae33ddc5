"""Reading one large stored value from front to back, a part at a time, without ever holding it whole."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.execute.pieces import lengths
from orbaxkit.formats import Done, Pending, Source, Value
from orbaxkit.formats.decoding import Undecodable, ValueReader
from orbaxkit.formats.items import Stored, expect, stored
from orbaxkit.planning.regions import Spans
from orbaxkit.specs import Specs

# A value that decodes to less is decoded at once, on several threads.
LARGE_BYTES = 16 << 20


@dataclass
class SequentialSource:
    """A source whose large values are decoded in order: each next part goes on where the last one ended.

    Parts of one leaf are asked for by one thread at a time; different leaves by any.
    """

    source: Source
    _streams: dict[str, tuple[tuple[int, ...], ValueReader]] = field(default_factory=dict)

    @property
    def specs(self) -> Specs:
        """Those of the source."""
        return self.source.specs

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the source."""
        return self.source.notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the source."""
        return self.source.warnings

    @property
    def writer(self) -> str | None:
        """That of the source."""
        return self.source.writer

    def value(self, name: str) -> Value:
        """A scalar or a string."""
        return self.source.value(name)

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Those of the source."""
        return self.source.problems(names)

    def expect(self, wanted: Iterable[tuple[str, tuple[slice, ...]]]) -> None:
        """Announce what will be read."""
        expect(self.source, wanted)

    def stored(self, name: str) -> Stored | None:
        """Where an array's stored values lie."""
        return stored(self.source, name)

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Go on with the stream of the large value that holds this region in one run; else as the source does."""
        found = stored(self.source, name)
        spans = tuple([(s.start, s.stop) for s in index])
        run = None if found is None else find_run(found, spans)
        if found is None or run is None or out.nbytes == 0:
            return self.source.read(name, index, out)
        self._read_run(name, found, run, out)
        return Done()

    def _read_run(self, name: str, found: Stored, run: "Run", out: np.ndarray) -> None:
        held = self._streams.get(name)
        if held is None or held[0] != run.position or held[1].at > run.start:
            self.finish(name)
            held = run.position, ValueReader(found.open, found.values[run.key], found.array.codec)
            self._streams[name] = held
        try:
            held[1].read_at(run.start, memoryview(out.reshape(-1).view(np.uint8)))
            if held[1].at == run.value_bytes:
                self.finish(name, is_whole=True)
        except (Undecodable, EOFError) as error:
            file = found.values[run.key].file
            problem = f"chunk {run.key}{f' in {file}' if file else ''}: {error}"
            raise CheckpointError("a leaf cannot be read", leaves=[(name, problem)], where=found.folder.path) from None

    def finish(self, name: str | None = None, is_whole: bool = False) -> None:
        """Close the stream of a leaf, or all of them."""
        for each in list(self._streams) if name is None else [name]:
            held = self._streams.pop(each, None)
            if held is not None:
                held[1].close(is_whole)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of bytes within one decoded value."""

    key: str
    position: tuple[int, ...]
    start: int
    value_bytes: int


def find_run(found: Stored, spans: Spans) -> Run | None:
    """The bytes of a large value that are a region and nothing else; None where a region is not such a run."""
    array = found.array
    if array.codec is None or array.shard_shape is not None or array.value_bytes < LARGE_BYTES:
        return None
    sizes = array.value_shape
    position = tuple([start // size for (start, _), size in zip(spans, sizes, strict=True)])
    inside = tuple([(a - p * s, b - p * s) for (a, b), p, s in zip(spans, position, sizes, strict=True)])
    if (
        any(stop > size for (_, stop), size in zip(inside, sizes, strict=True))
        or array.key(position) not in found.values
    ):
        return None
    if lengths(inside) == sizes:
        return None  # a whole value is decoded at once
    first = next((k for k, (a, b) in enumerate(inside) if b - a != 1), len(sizes))
    if any(span != (0, size) for span, size in zip(inside[first + 1 :], sizes[first + 1 :], strict=True)):
        return None
    start = sum(a * math.prod(sizes[k + 1 :]) for k, (a, _) in enumerate(inside)) * array.dtype.itemsize
    return Run(array.key(position), position, start, array.value_bytes)
