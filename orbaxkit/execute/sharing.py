"""Work shared among processes by bytes: the same shares wherever they are computed, from metadata alone."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

from orbaxkit.execute.encoded import Copies

_PIECES_PER_SHARE = 8  # so that none gets more than an eighth above a fair share, where the stored values allow it
_PIECE_BYTES = 1 << 20  # nothing smaller is cut


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does from start to end: values to copy, or windows that share what they read."""

    names: tuple[str, ...]  # of leaves to make
    copies: Mapping[str, Copies]
    work_bytes: int
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of leaves that are shared: the values to make


@dataclass(frozen=True, slots=True)
class Shares:
    """Each process's jobs, and a text by which two processes can tell that they computed the same."""

    jobs: tuple[tuple[Job, ...], ...]
    digest: str


def share(jobs: Sequence[Job], count: int, stored_values: Callable[[str], Mapping[str, int]]) -> Shares:
    """Cut large jobs by their stored values and give the largest piece left to whoever has least.

    `stored_values` gives the keys of a leaf's values and the bytes that each holds decoded.
    """
    most = max(sum(job.work_bytes for job in jobs) // count // _PIECES_PER_SHARE, _PIECE_BYTES)
    pieces = [(k, piece) for k, job in enumerate(jobs) for piece in _cut(job, most, stored_values)]
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i][1].work_bytes):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += pieces[i][1].work_bytes
    out = tuple([tuple(_joined([pieces[i] for i in sorted(own)])) for own in shares])
    return Shares(out, _digest(out))


def values_of(jobs: Sequence[Job], stored_values: Callable[[str], Mapping[str, int]]) -> dict[str, tuple[str, ...]]:
    """The keys of the stored values that jobs write, leaf by leaf."""
    out = {name: job.only.get(name) or tuple(stored_values(name)) for job in jobs for name in job.names}
    for job in jobs:
        out.update((name, tuple([key for key, _, _ in found.values])) for name, found in job.copies.items())
    return out


def _cut(job: Job, most: int, stored_values: Callable[[str], Mapping[str, int]]) -> Iterator[Job]:
    """The job, or where it is large its stored values in runs of at most so many bytes."""
    if job.work_bytes <= most:
        yield job
        return
    for name, found in job.copies.items():
        for run in _runs([value.length for _, _, value in found.values], most):
            piece = replace(found, values=found.values[run])
            yield Job((), {name: piece}, piece.nbytes)
    for name in job.names:
        sizes = stored_values(name)
        for run in _runs(list(sizes.values()), most):
            keys = tuple(sizes)[run]
            yield Job((name,), {}, sum(sizes[key] for key in keys), {name: keys})


def _runs(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive things of at most so many bytes together; one at least."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))


def _joined(pieces: Sequence[tuple[int, Job]]) -> Iterator[Job]:
    """Pieces of one job as one, so that what they read in common is read once, and in order."""
    for _, group in groupby(pieces, key=lambda piece: piece[0]):
        yield reduce(_join, [piece for _, piece in group])


def _join(first: Job, second: Job) -> Job:
    copies, only = dict(first.copies), dict(first.only)
    for name, found in second.copies.items():
        copies[name] = replace(found, values=copies[name].values + found.values) if name in copies else found
    for name, keys in second.only.items():
        only[name] = only.get(name, ()) + keys
    names = tuple(dict.fromkeys(first.names + second.names))
    return Job(names, copies, first.work_bytes + second.work_bytes, only)


def _digest(shares: Sequence[Sequence[Job]]) -> str:
    text = hashlib.sha256()
    for jobs in shares:
        for job in jobs:
            copied = {
                name: [(key, value.length) for key, _, value in found.values] for name, found in job.copies.items()
            }
            text.update(repr((job.names, copied, job.work_bytes, dict(job.only))).encode())
        text.update(b";")
    return text.hexdigest()
