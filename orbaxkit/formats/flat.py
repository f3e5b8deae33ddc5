"""Regions of C-ordered arrays that lie in a file as they are."""

import math
from typing import Any

import numpy as np

from orbaxkit.formats.files import pread_into

BLOCK_BYTES = 8 << 20
# Shorter runs are cut out of whole rows: a system call for each would cost more than the bytes between them.
_RUN_BYTES = 32 << 10


Spans = list[tuple[int, int]]


def read_region(file: Any, offset: int, shape: tuple[int, ...], spans: Spans, out: np.ndarray) -> None:
    """A region of the C-ordered array that begins at `offset` of an open file, into an array of the region's shape."""
    if out.size == 0:
        return
    row_bytes = math.prod(shape[1:]) * out.dtype.itemsize
    if spans[1:] == [(0, size) for size in shape[1:]]:
        start = spans[0][0] if spans else 0
        _fill(file, offset + start * row_bytes, memoryview(out.reshape(-1).view(np.uint8)))
        return
    low, high = spans[0]
    if _run_bytes(shape[1:], spans[1:], out.dtype.itemsize) >= _RUN_BYTES or row_bytes > BLOCK_BYTES:
        for i in range(low, high):
            read_region(file, offset + i * row_bytes, shape[1:], spans[1:], out[i - low])
        return
    rows = max(1, BLOCK_BYTES // row_bytes)
    inner = tuple(slice(*span) for span in spans[1:])
    for first in range(low, high, rows):
        block = np.empty((min(rows, high - first), *shape[1:]), out.dtype)
        _fill(file, offset + first * row_bytes, memoryview(block.reshape(-1).view(np.uint8)))
        out[first - low : first - low + len(block)] = block[(slice(None), *inner)]


def _run_bytes(shape: tuple[int, ...], spans: list[tuple[int, int]], itemsize: int) -> int:
    """The bytes that lie together in a region."""
    total = itemsize
    for size, (start, stop) in zip(reversed(shape), reversed(spans), strict=True):
        total *= stop - start
        if (start, stop) != (0, size):
            break
    return total


def _fill(file: Any, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = pread_into(file, view[done : done + (1 << 30)], offset + done)
        if not count:
            raise EOFError
        done += count
