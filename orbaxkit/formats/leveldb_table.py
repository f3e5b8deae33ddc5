"""LevelDB tables: sorted keys and values in blocks with checksums. TensorFlow's checkpoint index is one.

Source: leveldb's `doc/table_format.md`, and what TensorFlow 2.21 writes.
"""

import struct
from collections.abc import Iterator

import google_crc32c

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.snappy import decompress

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # how a block is compressed, and its CRC
_PLAIN, _SNAPPY = 0, 1
_MASK = 0xA282EAD8
# Keys are stored as what they do not share with the key before, so that a small block could spell out endless ones.
_MAX_GROWTH = 64
_SPARE_BYTES = 1 << 20


class Damaged(ValueError):
    """The bytes are not those of a table."""


def is_table(tail: bytes) -> bool:
    """Whether a file that ends so is a table."""
    return len(tail) >= 8 and struct.unpack("<Q", tail[-8:])[0] == MAGIC


def read_table(data: bytes, where: str) -> dict[bytes, bytes]:
    """All keys and values, in order. Raises CheckpointError: the table is cut short, or a block's CRC is wrong."""
    try:
        return dict(_ordered(_entries(data), _MAX_GROWTH * len(data) + _SPARE_BYTES))
    except (ValueError, IndexError, struct.error) as error:
        hint = "the copy or the download may be incomplete: fetch the file again"
        raise CheckpointError(f"the TensorFlow index is damaged: {error}", where=where, hint=hint) from None


def masked_crc(data: bytes, crc: int = 0) -> int:
    """The CRC-32C of data that goes on from `crc`, as LevelDB and TensorFlow store it."""
    return mask(google_crc32c.extend(crc, data))


def mask(crc: int) -> int:
    """A CRC of data that may hold CRCs itself."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer of at most 64 bits, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Damaged("a number is cut short or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < FOOTER_BYTES or not is_table(data):
        raise Damaged("it has no table's end")
    footer = data[-FOOTER_BYTES:]
    at = 0
    for _ in range(2):  # the handle of the metaindex, which is empty
        _, at = varint(footer, at)
    offset, at = varint(footer, at)
    size, _ = varint(footer, at)
    for _, handle in _pairs(_block(data, offset, size)):
        start, at = varint(handle, 0)
        length, _ = varint(handle, at)
        yield from _pairs(_block(data, start, length))


def _ordered(entries: Iterator[tuple[bytes, bytes]], most: int) -> Iterator[tuple[bytes, bytes]]:
    """The same entries; their keys only ever grow, so that no block counts twice, and hold at most so many bytes."""
    last = None
    for key, value in entries:
        if last is not None and key <= last:
            raise Damaged(f"its keys are not in order: {key[:40]!r} comes after {last[:40]!r}")
        most -= len(key)
        if most < 0:
            raise Damaged("its keys take far more bytes than the file has")
        yield key, value
        last = key


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER_BYTES > len(data):
        raise Damaged(f"a block of {size:,} bytes at {offset:,} is past the end of {len(data):,} bytes")
    kind, crc = struct.unpack_from("<BI", data, end)
    if masked_crc(data[offset : end + 1]) != crc:
        raise Damaged(f"the CRC of the block at {offset:,} is wrong")
    if kind == _PLAIN:
        return data[offset:end]
    if kind == _SNAPPY:
        return decompress(data[offset:end])
    raise Damaged(f"a block is compressed in the unknown way {kind}")


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys share their beginnings with the key before; restart points at the end of the block are for seeking only."""
    (restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise Damaged("a block has more restart points than bytes")
    at, key = 0, b""
    if not end:
        raise Damaged("a block holds no entry")
    while at < end:
        shared, at = varint(block, at)
        fresh, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + fresh + length > end:
            raise Damaged("an entry leads out of its block")
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + length]
        at += length
