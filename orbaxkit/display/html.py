"""Checkpoints and plans as folding HTML for notebooks: no scripts, the page's own colours, everything escaped."""

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from orbaxkit.display.header import header
from orbaxkit.display.table import describe_leaf
from orbaxkit.display.text import counted, human_bytes
from orbaxkit.display.tree import Row, build, expand

SHOWN_ROWS = 2000
_STYLE = "font-family: monospace; line-height: 1.5; overflow-wrap: anywhere"
_INSIDE = "margin-left: 1.5em"
_QUIET = "opacity: 0.65"


def to_html(checkpoint: Any) -> str:
    """Show a checkpoint in a notebook: its header, and levels that fold."""
    rows = expand(build(checkpoint.specs), depth=None, limit=SHOWN_ROWS)
    head = "".join(f"<div>{_quiet(label)} {escape(text)}</div>" for label, text in header(checkpoint))
    return f'<div style="{_STYLE}">{head}<div style="margin-top: 0.5em">{_levels(rows)}</div></div>'


# What the first letter of a plan's lines stands for.
_SIGNS = {"=": "kept", "~": "changed", "+": "filled", "-": "dropped"}


def plan_to_html(text: str) -> str:
    """Show a plan in a notebook: its first line, and a fold for what is kept, changed, filled and dropped."""
    first, *lines = text.splitlines()
    folds = ""
    for sign, group in groupby(lines, key=lambda line: line[:1]):
        rows = [f"<div>{escape(line[2:])}</div>" for line in group]
        label = f"{_SIGNS.get(sign, 'more')}: {counted(len(rows), 'line')}"
        is_open = " open" if sign in "~+" else ""
        inside = f'<div style="{_INSIDE}">{"".join(rows)}</div>'
        folds += f"<details{is_open}><summary>{escape(label)}</summary>{inside}</details>"
    return f'<div style="{_STYLE}"><div>{escape(first)}</div>{folds}</div>'


def _levels(rows: Iterable[Row]) -> str:
    return "".join(_level(row) for row in rows)


def _level(row: Row) -> str:
    more = f"<div>{_quiet(f'… and {row.hidden:,} more')}</div>" if row.hidden else ""
    if not row.children:
        return f"<div>{_line(row)}</div>{more}"
    is_open = " open" if row.level == 0 else ""
    inside = f'<div style="{_INSIDE}">{_levels(row.children)}</div>'
    return f"<details{is_open}><summary>{_line(row)}</summary>{inside}</details>{more}"


def _line(row: Row) -> str:
    size = "? B" if row.has_unknown_bytes else human_bytes(row.nbytes)
    if row.node.spec is not None:
        times = f"{row.times:,} × " if row.times > 1 else ""
        return (
            f"{escape(row.name)} {_quiet(times + describe_leaf(row.node.spec) + (f', {size}' if row.nbytes else ''))}"
        )
    more = "/…" if row.is_collapsed else ""
    below = f"{counted(row.leaves, 'leaf', 'leaves')}, {counted(row.parameters, 'parameter')}, {size}"
    return f"{escape(row.name)}{more} {_quiet(below)}"


def _quiet(text: str) -> str:
    return f'<span style="{_QUIET}">{escape(text)}</span>'
