"""Snappy, raw format: what a LevelDB table may compress its blocks with. Source: snappy's `format_description.txt`."""

# No block of an index comes near this.
_MAX_BYTES = 64 << 20


def decompress(data: bytes) -> bytes:
    """The bytes that were compressed. Raises ValueError: they are cut short, or do not have the length they say."""
    size, at = _length(data)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                count = length - 59
                length = int.from_bytes(data[at : at + count], "little")
                at += count
            out += data[at : at + length + 1]
            at += length + 1
        else:
            length, offset, at = _copy(data, tag, at)
            if not 0 < offset <= len(out):
                raise ValueError("a snappy copy begins before the data")
            start = len(out) - offset
            part = out[start : start + length]
            out += (part * (length // offset + 1))[:length]  # a copy may overlap itself: then it repeats
        if len(out) > size or at > len(data):
            raise ValueError("snappy data is not as long as it says")
    if len(out) != size:
        raise ValueError("snappy data is not as long as it says")
    return bytes(out)


def _length(data: bytes) -> tuple[int, int]:
    size = 0
    for at, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            if size > _MAX_BYTES:
                break
            return size, at + 1
    raise ValueError("snappy data has no sensible length")


def _copy(data: bytes, tag: int, at: int) -> tuple[int, int, int]:
    """The length and the offset of a copy, and where it ends."""
    if tag & 3 == 1:
        return (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at], at + 1
    count = 2 if tag & 3 == 2 else 4
    return (tag >> 2) + 1, int.from_bytes(data[at : at + count], "little"), at + count
