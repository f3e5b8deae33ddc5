"""The walkthrough notebook runs top to bottom, and shows what its committed outputs show, in kind.

python tests/test_notebook.py

runs it and writes its outputs back, without what tells of the machine.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import orbaxkit

NOTEBOOK = Path(__file__).parent.parent / "colab/walkthrough.ipynb"
# Folders that only some machine has, also Colab's; what the notebook writes has relative paths.
MACHINE_PATH = re.compile(r"(?<![\w.…])/(tmp|var|home|root|work|opt|usr|mnt|Users|private|content)/|[A-Z]:\\\\")
SECONDS = 300  # for one cell, on a busy machine
TREES, PICTURES = 3, 1  # at least: checkpoints and plans that fold, charts


def executed(folder: Path) -> Any:
    """The notebook after a run in this folder, by this interpreter."""
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        allow_errors=True,
        coalesce_streams=True,
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(Path(orbaxkit.__file__).parent.parent)})
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: Any) -> list[str]:
    """What a cell shows, in kind: the names of its streams and the formats of its results, each once."""
    kinds = [o.name if o.output_type == "stream" else " ".join(sorted(o.get("data", ["error"]))) for o in cell.outputs]
    return list(dict.fromkeys(kinds))


def texts(notebook: Any) -> list[str]:
    """Every text in its outputs."""
    shown = [output for cell in code_cells(notebook) for output in cell.outputs]
    data = [text for output in shown for kind, text in output.get("data", {}).items() if not kind.startswith("image/")]
    return data + [output.text for output in shown if output.output_type == "stream"]


def sizes(said: str, row: str) -> list[float]:
    """The sizes in a row of the table: of the arrays, of what was read (where that is counted), of the peak."""
    (line,) = [line for line in said.splitlines() if line.startswith(row)]
    return [float(size) for size in re.findall(r"([\d.]+) MiB", line)]


@pytest.fixture(scope="module")
def committed() -> Any:
    return nbformat.read(NOTEBOOK, 4)


def test_it_runs_and_shows_what_the_committed_outputs_show(
    committed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # no kernel but this interpreter's
    (tmp_path / "run").mkdir()
    again = executed(tmp_path / "run")
    errors = ["\n".join(o.traceback) for cell in code_cells(again) for o in cell.outputs if o.output_type == "error"]
    assert not errors, errors[0]
    for cell, before in zip(code_cells(again), code_cells(committed), strict=True):
        shown = [kind for kind in outputs(cell) if kind != "stderr"]  # a library's warning is not the notebook's
        assert shown == outputs(before), cell.source
    said = "\n".join(texts(again))
    assert "the same values, bit for bit: 37 leaves" in said
    assert "the same outputs within 1e-4: True" in said
    assert "ScaleByAdamState, count 20, moments of 30 params" in said
    for ours, orbax in zip(sizes(said, "ok.restore_params(path)"), sizes(said, "Orbax, everything"), strict=True):
        assert ours < 0.6 * orbax


def test_its_outputs_are_committed_without_a_trace_of_a_machine(committed: Any):
    formats = [kind for cell in code_cells(committed) for kind in outputs(cell)]
    assert sum("text/html" in kind for kind in formats) >= TREES
    assert sum("image/png" in kind for kind in formats) >= PICTURES
    assert "stderr" not in formats
    assert [text for text in texts(committed) if MACHINE_PATH.search(text)] == []
    assert {cell.execution_count for cell in code_cells(committed)} == {None}
    assert committed.metadata.kernelspec.name == "python3"


def tidy(notebook: Any, folder: str) -> None:
    """Strip what differs from run to run and from machine to machine."""
    for cell in code_cells(notebook):
        cell.execution_count, cell.metadata = None, {}
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            if output.output_type == "stream":
                output.text = output.text.replace(f"{folder}/", "")
            for kind in output.get("data", {}):
                output.data[kind] = output.data[kind].replace(f"{folder}/", "")
    notebook.metadata = nbformat.read(NOTEBOOK, 4).metadata


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
        tidy(notebook, os.path.realpath(folder))
        nbformat.write(notebook, NOTEBOOK)
