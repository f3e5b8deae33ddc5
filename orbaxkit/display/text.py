"""Numbers and columns as plain text."""

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human_bytes(number: int) -> str:
    """`72 B`, `1.5 KiB`, `3.1 GiB`: three digits, units of 1024."""
    size, unit = float(number), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{number} B"
    return f"{size:.2f} {_UNITS[unit]}" if size < 9.995 else f"{size:.{1 if size < 99.95 else 0}f} {_UNITS[unit]}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 parameter`, `1,024 parameters`, `2 leaves`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def align(rows: Iterable[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Cells in columns, two spaces apart, those of `right` columns flush right; no spaces at the ends of lines."""
    rows = list(rows)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(right))]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
