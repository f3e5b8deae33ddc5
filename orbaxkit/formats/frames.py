"""Whether stored bytes are whole, told from headers and indexes alone: nothing is decoded."""

import math
from collections.abc import Callable

from orbaxkit.formats.decoding import crc32c
from orbaxkit.formats.zarr import ZarrArray

# `read(size, offset)` gives some of the bytes that are judged; fewer at their end.
ReadBytes = Callable[[int, int], bytes]

MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_HEADER_BYTES = 18
_RLE, _RESERVED = 1, 3
_MAX_BLOCK_BYTES = 128 << 10
_NO_CHUNK = (1 << 64) - 1


def value_problem(read: ReadBytes, length: int, array: ZarrArray) -> str | None:
    """Why `length` bytes are no stored value of an array, as far as can be told undecoded."""
    if array.shard_shape is not None:
        return _shard_problem(read, length, array)
    return _chunk_problem(read, length, array.value_bytes, array.codec)


def has_holes(read: ReadBytes, length: int, array: ZarrArray, inside: tuple[int, ...]) -> bool:
    """Whether a shard lacks chunks, of those that begin within `inside`, its part of the array."""
    try:
        entries = _shard_entries(read, length, array)
    except ValueError:
        return False  # damaged, which is another matter
    per_shard = _per_shard(array)
    needed = [-(-size // chunk) for size, chunk in zip(inside, array.chunk_shape, strict=True)]
    for i, (offset, _) in enumerate(entries):
        if offset == _NO_CHUNK and all(at < n for at, n in zip(_position(i, per_shard), needed, strict=True)):
            return True
    return False


def _shard_problem(read: ReadBytes, length: int, array: ZarrArray) -> str | None:
    """Its index, by its checksum, and each of its chunks; what chunks it may lack is not judged here."""
    try:
        entries = _shard_entries(read, length, array)
    except ValueError as error:
        return str(error)
    data_bytes = length - _index_bytes(array)
    chunk_bytes = math.prod(array.chunk_shape) * array.dtype.itemsize
    held = [(i, offset, size) for i, (offset, size) in enumerate(entries) if offset != _NO_CHUNK]
    if not held:
        return "its shard holds no chunk"
    for i, offset, size in held:
        if offset + size > data_bytes:
            return "its shard names bytes past its end"
        problem = _chunk_problem(_part(read, offset, size), size, chunk_bytes, array.codec)
        if problem:
            return problem if len(entries) == 1 else f"chunk {i} of its shard: {problem}"
    return None


def _part(read: ReadBytes, start: int, length: int) -> ReadBytes:
    return lambda size, at: read(max(0, min(size, length - at)), start + at)


def _shard_entries(read: ReadBytes, length: int, array: ZarrArray) -> list[tuple[int, int]]:
    """Offset and length of each chunk of a shard, from its last bytes, which end in their CRC-32C."""
    size = _index_bytes(array)
    if size > length:
        raise ValueError("its shard is cut short")
    tail = read(size, length - size)
    if len(tail) < size:
        raise ValueError("its shard is cut short")
    if crc32c(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
        raise ValueError("the index of its shard is damaged (CRC-32C)")
    numbers = [int.from_bytes(tail[at : at + 8], "little") for at in range(0, size - 4, 8)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _index_bytes(array: ZarrArray) -> int:
    return 16 * math.prod(_per_shard(array)) + 4


def _per_shard(array: ZarrArray) -> tuple[int, ...]:
    return tuple([s // c for s, c in zip(array.value_shape, array.chunk_shape, strict=True)])


def _position(i: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(grid):
        i, at = divmod(i, size)
        out.append(at)
    return tuple(reversed(out))


def _chunk_problem(read: ReadBytes, length: int, decoded_bytes: int, codec: str | None) -> str | None:
    if codec == "zstd":
        return frame_problem(read, length, decoded_bytes)
    return None if length == decoded_bytes else f"has {length:,} of {decoded_bytes:,} bytes"


def frame_problem(read: ReadBytes, length: int, decoded_bytes: int) -> str | None:
    """Why `length` bytes are not frames that decode to so many bytes.

    Frames are walked block by block, each of up to 128 KB, by the sizes in their headers (RFC 8878).
    """
    at, known, is_known = 0, 0, True
    while at < length:
        head = read(min(_HEADER_BYTES, length - at), at)
        if len(head) >= 8 and int.from_bytes(head[:4], "little") in _SKIPPABLE:
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        found = _frame_header(head)
        if found is None:
            return "not zstd, or damaged"
        size, content, has_checksum = found
        known += content or 0
        is_known = is_known and content is not None
        end = _end_of_blocks(read, at + size, length)
        at = length + 1 if end is None else end + 4 * has_checksum
    if at != length:
        return "its bytes are cut short"
    if known == decoded_bytes or (known < decoded_bytes and not is_known):
        return None
    return f"decodes to {known:,} bytes, its shape has {decoded_bytes:,}"


def _frame_header(head: bytes) -> tuple[int, int | None, bool] | None:
    """The header's size, the decoded bytes if it says so, and whether a checksum ends the frame."""
    import zstandard

    if head[:4] != MAGIC:
        return None
    try:
        size, found = zstandard.frame_header_size(head), zstandard.get_frame_parameters(head)
    except zstandard.ZstdError:
        return None
    content = None if found.content_size == zstandard.CONTENTSIZE_UNKNOWN else found.content_size
    return size, content, bool(found.has_checksum)


def _end_of_blocks(read: ReadBytes, at: int, length: int) -> int | None:
    """Where the last block of a frame ends; None where the bytes end before."""
    while at + 3 <= length:
        header = int.from_bytes(read(3, at), "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED or size > _MAX_BLOCK_BYTES:
            return None
        at += 3 + (1 if kind == _RLE else size)
        if is_last:
            return at if at <= length else None
    return None
