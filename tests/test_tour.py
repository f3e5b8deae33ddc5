"""The tour: its own example is shaped like a real pi0 train state, and a user's checkpoint is only read."""

import json
import re
import warnings
from pathlib import Path

import pytest

import orbaxkit as ok
from orbaxkit._example import write_example
from orbaxkit._tour import STOPS, tour


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return folder


def stored_names(item: Path) -> list[str]:
    entries = json.loads((item / "array_metadatas/process_0").read_text())["array_metadatas"]
    return [entry["array_metadata"]["param_name"] for entry in entries]


def test_the_example_has_the_names_of_a_pi0_train_state(example: Path):
    names = stored_names(example / "3/train_state")
    moments = [name for name in names if name.startswith("opt_state.1.0.mu.")]
    assert len(names) == 65
    assert len(moments) == 31
    assert "opt_state.1.0.mu.PaliGemma.img.Transformer.encoderblock.MlpBlock_0.Dense_1.kernel.value" in moments
    assert {"step", "opt_state.1.0.count", "opt_state.1.2.count"} < set(names)
    assert not [name for name in names if ".llm." in name]
    assert [name for name in stored_names(example / "3/params") if ".llm.layers." in name]


def test_every_stop_is_shown_in_order(example: Path):
    lines = list(tour(example))
    assert [line for line in lines if re.match(r"\d+\. ", line)] == [f"{i}. {s.title}" for i, s in enumerate(STOPS, 1)]


def test_only_the_params_bytes_are_read(example: Path):
    (line,) = [line for line in tour(example) if line.startswith("read ")]
    read, stored = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= bytes| in)", line))
    params = sum(file.stat().st_size for file in (example / "3/params").rglob("*") if file.is_file())
    assert 0 < read <= params
    assert read < 0.6 * stored


def test_a_users_checkpoint_is_only_read(example: Path):
    def contents() -> dict[Path, tuple[int, bytes]]:
        return {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in example.rglob("*") if f.is_file()}

    before = contents()
    list(tour(example))
    assert contents() == before


def test_without_a_path_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    assert list(tour(progress=said.append))
    assert said
    assert not list(tmp_path.iterdir())


GOLDEN = Path(__file__).parent / "golden"
SOME = ("0.2.7/c_int", "0.4.8/a_flax_save_args", "0.11.20/f_typed_keys", "0.12.8/c_top_leaf", "pi05_train_state")


@pytest.mark.parametrize("name", SOME)
def test_what_a_checkpoint_lacks_is_said_and_the_tour_goes_on(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ok.CheckpointWarning)
        text = "\n".join(tour(GOLDEN / name))
    assert f"{len(STOPS)}. {STOPS[-1].title}" in text
    assert "NOT" not in text
