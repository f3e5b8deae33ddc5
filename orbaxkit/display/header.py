"""What stands above the table: format, writer, step, items, the saved mesh, the optimizer's states, notes."""

from collections.abc import Iterable
from typing import Any

from orbaxkit.display.text import counted, human_bytes
from orbaxkit.display.tree import has_unknown_bytes
from orbaxkit.errors import shorten, shown
from orbaxkit.slots import describe_slots
from orbaxkit.specs import Specs

SHOWN_STEPS = 8
SHOWN_STATES = 12


def header(checkpoint: Any) -> list[tuple[str, str]]:
    """Rows of a label and a text; a label may repeat, and what is unknown or as usual is left out."""
    layout, specs = checkpoint.layout, checkpoint.specs
    rows = [("path", layout.path), ("format", layout.format)]
    if checkpoint.writer and checkpoint.writer != layout.format:
        rows.append(("written by", checkpoint.writer))
    rows += _step_rows(layout)
    rows.append(("items" if len(checkpoint.items) > 1 else "item", ", ".join(checkpoint.items)))
    if layout.other_items:
        rows.append(("other items", ", ".join(layout.other_items)))
    if not any(note.startswith("saved on") for note in checkpoint.notes):
        rows += [("saved on", text) for text in [_saved_on(specs)] if text]
    rows.append(("total", totals(specs)))
    rows += _optimizer_rows(describe_slots(specs))
    rows += [("note", note) for note in checkpoint.notes]
    return [(label, shown(text)) for label, text in rows if text]


def totals(specs: Specs) -> str:
    """`65 leaves, 834,000,000 parameters, 3.1 GiB (2.9 GiB stored)`."""
    unknown = any(has_unknown_bytes(spec) for spec in specs.leaves.values())
    stored = [spec.stored_bytes for spec in specs.leaves.values() if spec.stored_bytes is not None]
    size = "bytes unknown" if unknown else human_bytes(specs.nbytes)
    on_disk = f" ({human_bytes(sum(stored))} stored)" if stored else ""
    return f"{counted(len(specs), 'leaf', 'leaves')}, {counted(specs.parameters, 'parameter')}, {size}{on_disk}"


def _step_rows(layout: Any) -> list[tuple[str, str]]:
    rows = []
    if layout.step is not None or layout.step_name:
        rows.append(("step", str(layout.step if layout.step is not None else layout.step_name)))
    if len(layout.steps) > 1:
        rows.append(("steps", _some([str(step) for step, _ in layout.steps])))
    if not layout.is_finished:
        rows.append(("finished", "no"))
    if layout.unfinished:
        rows.append(("unfinished", _some(list(layout.unfinished))))
    return rows


def _some(names: list[str]) -> str:
    """The first and the last names of many."""
    if len(names) <= SHOWN_STEPS:
        return ", ".join(names)
    return f"{', '.join(names[: SHOWN_STEPS - 2])}, … {', '.join(names[-2:])} ({len(names):,})"


def _saved_on(specs: Specs) -> str:
    """The meshes and devices that the leaves' shardings name."""
    shardings = {spec.sharding for spec in specs.leaves.values() if spec.sharding is not None}
    meshes = {(s.mesh_shape, s.axis_names) for s in shardings if s.axis_names}
    texts = [f"a {'x'.join(map(str, shape))} mesh ({', '.join(names)})" for shape, names in sorted(meshes)]
    return ", ".join([*texts, *sorted({s.device for s in shardings if s.device})])


def _optimizer_rows(lines: Iterable[str]) -> list[tuple[str, str]]:
    """One row while it is short, else one per state."""
    lines = list(lines)
    if not lines:
        return []
    if len(lines) <= 3:
        return [("optimizer", "; ".join(lines))]
    return [("optimizer", line) for line in shorten(lines, SHOWN_STATES)]
