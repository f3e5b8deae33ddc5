"""A checkpoint as plain text: a header and a tree table."""

import re
from typing import Any

from orbaxkit.display.header import header, totals
from orbaxkit.display.text import align, human_bytes
from orbaxkit.display.tree import Row, Sort, build, expand, selected, walk
from orbaxkit.errors import shown
from orbaxkit.specs import LeafSpec, Specs

SHOWN_ROWS = 60


def render(
    checkpoint: Any,
    *,
    depth: int | None = None,
    select: "str | re.Pattern[str] | None" = None,
    sort: Sort | None = None,
) -> str:
    """Show a checkpoint: what it is, then leaves, parameters and bytes per level.

    `depth` counts levels; without it the table opens as far as about sixty rows allow. `select` is a pattern over whole
    paths (`params/**`); one that matches nothing raises `TransformError`. Reads no array bytes.
    """
    specs = selected(checkpoint.specs, select)
    rows = header(checkpoint)
    if select is not None:
        rows.append(("selected", totals(specs)))
    width = max(len(label) for label, _ in rows)
    lines = [f"{label.ljust(width)}  {text}" for label, text in rows]
    return "\n".join([*lines, "", *table(specs, depth=depth, sort=sort)])


def table(specs: Specs, *, depth: int | None = None, sort: Sort | None = None) -> list[str]:
    """The lines of the tree table of some leaves."""
    top = expand(build(specs), depth=depth, limit=SHOWN_ROWS, sort=sort)
    cells = [("", "leaves", "parameters", "bytes", "")]
    for row in walk(top):
        cells.append(_cells(row))
        if row.hidden:
            cells.append((f"… and {row.hidden:,} more", "", "", "", ""))
    lines = align(cells, (False, True, True, True, False))
    is_cut = depth is None and any(row.is_collapsed or row.hidden for row in walk(top))
    return [*lines, *(["", "/… has more inside: ask for a depth, or select a subtree"] if is_cut else [])]


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    name = "  " * row.level + row.name + ("/…" if row.is_collapsed else "")
    spec = row.node.spec
    if spec is not None:
        leaves = f"{row.leaves:,}" if row.times > 1 else ""
        parameters = f"{row.parameters:,}" if row.parameters else ""
        size = "?" if row.has_unknown_bytes else human_bytes(row.nbytes) if row.nbytes else ""
        return name, leaves, parameters, size, describe_leaf(spec)
    size = "?" if row.has_unknown_bytes else human_bytes(row.nbytes)
    return name, f"{row.leaves:,}", f"{row.parameters:,}", size, ""


def describe_leaf(spec: LeafSpec) -> str:
    """`bfloat16[27, 1152] P(data, None)`: dtype, shape, and how the array was sharded where it was."""
    partition = ""
    if spec.sharding is not None and spec.sharding.axis_names:
        partition = " " + str(spec.sharding).partition(" on ")[0]
    kind = f" {spec.kind}" if spec.kind in ("scalar", "numpy") else ""
    return shown(f"{spec}{kind}{partition}")
