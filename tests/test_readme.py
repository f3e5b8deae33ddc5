"""The README's Python blocks run, in order and in one session, and print what it shows."""

import io
import itertools
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from servers.object_server import ObjectServer

pytest_plugins = ["servers.fixtures"]

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Every fenced block: its language and its text."""
    return [(found[1], found[2]) for found in BLOCK.finditer(README.read_text())]


def examples() -> list[tuple[str, str | None]]:
    """Every Python block with the output that follows it, if one does."""
    every = [*blocks(), ("", "")]
    return [
        (text, after[1] if after[0] == "text" else None)
        for (kind, text), after in itertools.pairwise(every)
        if kind == "python"
    ]


def comparable(output: str) -> str:
    """Output without what differs between machines: the folder, stored bytes, who wrote it and where."""
    varying = r"^path .*$|^written by .*$|^note saved on .*$|\(.* stored\)|reads .* of .*,"
    return re.sub(varying, "…", re.sub(r" +", " ", output), flags=re.MULTILINE).strip()


def test_there_are_exactly_two_commands_on_the_first_screen():
    shell = [text.strip() for kind, text in blocks() if kind in ("sh", "bash", "shell", "console")]
    assert shell[0].splitlines() == ["pip install . && orbaxkit tour", "pip install '.[test]' && pytest"]


@pytest.mark.usefixtures("s3_env")
def test_the_python_blocks_print_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, object_server: ObjectServer
):
    monkeypatch.chdir(tmp_path)
    object_server.objects["my-bucket"] = {}
    session: dict = {}
    assert examples()
    for code, shown in examples():
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(code, str(README), "exec"), session)
        if shown is not None:
            assert comparable(out.getvalue()) == comparable(shown)
