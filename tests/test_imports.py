"""The shape of the package: which room may import which, what a name is, and what `inspect` costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import orbaxkit
from orbaxkit.paths import KeyPath, format_path

PACKAGE = Path(orbaxkit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# From left to right: a room imports only itself and rooms before it. Verbs are the modules that begin with `_`.
ROOMS = (
    {"paths", "errors", "arguments"},
    {"specs"},
    {"states", "slots"},
    {"display"},
    {"trees", "growing"},
    {"formats"},
    {"planning"},
    {"transforms"},
    {"execute"},
    {"optimizer"},
    {"recipes", "matching"},
    {"verbs"},
    {"cli"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def room_of(dotted: str) -> str:
    """The room of `orbaxkit.<part>.…`."""
    part = dotted.split(".")[1]
    if part == "__main__":
        return "cli"
    return "verbs" if part.startswith("_") else part


def dotted_name(path: Path) -> str:
    return ".".join(("orbaxkit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports anywhere, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("orbaxkit."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module == "orbaxkit":
                yield from (f"orbaxkit.{alias.name}" for alias in node.names if alias.name != "__version__")
            elif node.module and node.module.startswith("orbaxkit."):
                yield node.module


@pytest.mark.parametrize("path", [p for p in MODULES if p != PACKAGE / "__init__.py"], ids=dotted_name)
def test_rooms_import_only_rooms_to_their_left(path: Path):
    own = RANK[room_of(dotted_name(path))]
    wrong = [name for name in imported(path) if RANK[room_of(name)] > own]
    assert wrong == []


def run(code: str, *args: str) -> str:
    """Run Python code in a process of its own and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_is_cheap():
    modules = run("import sys; before = set(sys.modules); import orbaxkit; print(sorted(set(sys.modules) - before))")
    assert set(ast.literal_eval(modules)) <= {"orbaxkit", "typing", "collections.abc", "copyreg", "re", "warnings"} | {
        name for name in ast.literal_eval(modules) if name.split(".")[0] in sys.stdlib_module_names
    }


INSPECT = """
import sys
from orbaxkit.cli import main
code = main(sys.argv[1:])
heavy = ("jax", "jaxlib", "flax", "orbax", "optax", "rich")
print("\\n" + repr((code, sorted(name for name in heavy if name in sys.modules))))
"""


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_inspect_imports_neither_jax_nor_flax_nor_orbax_nor_rich(checkpoint: Path, flags: list[str]):
    assert run(INSPECT, "inspect", str(checkpoint), *flags).split("\n")[-2] == "(0, [])"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in Orbax's first layout, written by hand: one folder per array."""
    folder = tmp_path_factory.mktemp("plain")
    keys: KeyPath = ("params", "w")
    (folder / "params.w").mkdir()
    array = {"chunks": [2], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C"}
    (folder / "params.w/.zarray").write_text(json.dumps({**array, "shape": [2], "zarr_format": 2}))
    (folder / "params.w/0").write_bytes(bytes(8))
    entry = {"key_metadata": [{"key": key, "key_type": 2} for key in keys]}
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {format_path(keys): {**entry, "value_metadata": value}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_zarr3": False}))
    return folder


def test_public_names_are_no_modules():
    """Else importing `orbaxkit.plan`, say, would turn `ok.plan` into a module."""
    inside = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(orbaxkit.__all__) & inside == set()


USABLE = """
import importlib, pkgutil, orbaxkit
for module in pkgutil.walk_packages(orbaxkit.__path__, "orbaxkit."):
    importlib.import_module(module.name)
kinds = {name: type(getattr(orbaxkit, name)).__name__ for name in orbaxkit.__all__ if name != "__version__"}
print([name for name in kinds if not callable(getattr(orbaxkit, name)) or kinds[name] == "module"])
"""


def test_every_public_name_is_callable_after_importing_every_module():
    assert run(USABLE) == "[]\n"


def test_public_names_are_the_ones_that_type_checkers_see():
    """The lazy table and the imports for type checkers cannot drift apart."""
    block = next(node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    homes = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen | {"__version__"} == set(orbaxkit.__all__)
    assert {homes[name] for name in seen} >= {"orbaxkit.transforms", "orbaxkit.specs"}
    assert len(orbaxkit.__all__) == len(set(orbaxkit.__all__))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        orbaxkit.nothing  # noqa: B018
    assert set(dir(orbaxkit)) == set(orbaxkit.__all__)
