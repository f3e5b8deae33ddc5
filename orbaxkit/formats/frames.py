"""Whether stored bytes are whole zstd frames, told from their headers alone: nothing is decoded."""

from collections.abc import Callable

MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_HEADER_BYTES = 18
_RLE, _RESERVED = 1, 3


def frame_problem(read: Callable[[int, int], bytes], length: int, decoded_bytes: int) -> str | None:
    """Why `length` bytes are not frames that decode to so many bytes; `read(size, offset)` gives some of them.

    Frames are walked block by block, each of up to 128 KB, by the sizes in their headers (RFC 8878).
    """
    at, known = 0, 0
    while at < length:
        head = read(min(_HEADER_BYTES, length - at), at)
        if len(head) >= 8 and int.from_bytes(head[:4], "little") in _SKIPPABLE:
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        found = _frame_header(head)
        if found is None:
            return "not zstd, or damaged"
        size, content, has_checksum = found
        known += decoded_bytes - known if content is None else content
        end = _end_of_blocks(read, at + size, length)
        at = length + 1 if end is None else end + 4 * has_checksum
    if at != length:
        return "its bytes are cut short"
    return None if known == decoded_bytes else f"decodes to {known:,} bytes, its shape has {decoded_bytes:,}"


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


def _end_of_blocks(read: Callable[[int, int], bytes], at: int, length: int) -> int | None:
    """Where the last block of a frame ends; None where the bytes end before."""
    while at + 3 <= length:
        header = int.from_bytes(read(3, at), "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            return None
        at += 3 + (1 if kind == _RLE else size)
        if is_last:
            return at if at <= length else None
    return None
