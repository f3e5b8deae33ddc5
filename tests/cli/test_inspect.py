"""`orbaxkit inspect` as people run it: a process, its output, its errors, its exit code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import orbaxkit
from orbaxkit.cli import VERBS, main


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with two items each, written by plain Orbax: params, and a train state without them."""
    root = tmp_path_factory.mktemp("run") / "root"
    params = {f"layers_{i}": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)} for i in range(3)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 10)))
    state = {"opt_state": tx.init(params), "step": 7, "name": "a run"}
    with ocp.CheckpointManager(root) as manager:
        for step in (10, 20):
            items = {"params": ocp.args.PyTreeSave(params), "train_state": ocp.args.PyTreeSave(state)}
            manager.save(step, args=ocp.args.Composite(**items))
    (root / "30.orbax-checkpoint-tmp").mkdir()
    return root


def orbaxkit_process(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(Path(orbaxkit.__file__).parent.parent)}
    command = [sys.executable, "-m", "orbaxkit", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, **options)  # type: ignore[call-overload]


def test_A2_a_root_shows_its_latest_step_with_both_items(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root)]) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "step 20" in lines
    assert "steps 10, 20" in lines
    assert "items params, train_state" in lines
    assert "unfinished 30.orbax-checkpoint-tmp" in lines
    assert "params 6 120 480 B" in lines
    assert "layers_{0..2} 6 120 480 B" in lines
    assert err == ""


def test_the_optimizer_is_named_over_both_items(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root), "--depth", "1"]) == 0
    assert (
        "optimizer   train_state/opt_state/1/0 Adam-like (count, mu, nu): moments for 6 params, 120 values each; "
        "train_state/opt_state/1/2 schedule-like (count)\n"
    ) in capsys.readouterr().out


def test_one_item_alone_has_no_params(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root), "--item", "train_state", "--step", "10"]) == 0
    assert (
        "opt_state/1/0 Adam-like (count, mu, nu): moments for 6 params, 120 values each; "
        "opt_state/1/2 schedule-like (count); no params in this item\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("place", ["20", "20/params"], ids=["step", "item"])
def test_A2_a_step_and_an_item_open_too(run_root: Path, place: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root / place)]) == 0
    assert "layers_{0..2}" in capsys.readouterr().out


def test_json_holds_every_leaf(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["step"], found["steps"]) == ("orbax", 20, [10, 20])
    params = found["items"]["params"]
    assert (params["parameters"], params["nbytes"], len(params["leaves"])) == (120, 480, 6)
    leaves = {leaf["path"]: leaf for leaf in found["items"]["train_state"]["leaves"]}
    assert leaves["opt_state/1/0/count"]["keys"] == ["opt_state", 1, 0, "count"]
    assert (leaves["name"]["kind"], leaves["step"]["kind"]) == ("string", "scalar")
    assert leaves["opt_state/1/0/mu/layers_0/kernel"]["shape"] == [4, 8]
    assert leaves["opt_state/0"]["dtype"] == "None"


def test_json_selects(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root), "--json", "--select", "params/**/kernel"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert [len(item["leaves"]) for item in items.values()] == [3, 0]


def test_print_shows_the_same_as_the_command(run_root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(run_root)]) == 0
    assert capsys.readouterr().out == f"{orbaxkit.open(run_root)}\n"  # type: ignore[operator]


def test_notebooks_get_a_folding_tree(run_root: Path):
    assert "<details" in orbaxkit.open(run_root)._repr_html_()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-folder"], "no such file or folder"),
        (["{root}", "--step", "11"], "11"),
        (["{root}", "--item", "parms"], "'parms'"),
        (["{root}", "--select", "parms/**"], "'parms/**' matches no leaf"),
        (["{root}", "--select", "a/**b"], "stray"),
    ],
    ids=["path", "step", "item", "pattern", "bad pattern"],
)
def test_what_cannot_be_shown_is_one_error(
    run_root: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["inspect", *(arg.format(root=run_root) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "{"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "checkpoint").write_text(content)
    assert main(["inspect", str(tmp_path / "checkpoint")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    "args",
    [[], ["inspect"], ["inspect", "x", "--depth", "0"], ["inspect", "x", "--sort", "name"], ["inspct", "x"]],
    ids=["no verb", "no path", "depth 0", "unknown sort", "unknown verb"],
)
def test_wrong_usage_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("usage: orbaxkit")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_helps_with_two_examples(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0
    examples = capsys.readouterr().out.split("examples:\n")[1].strip().splitlines()
    assert len(examples) >= 2
    assert all(line.strip().startswith(f"orbaxkit {verb}") for line in examples)


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"orbaxkit {orbaxkit.__version__}\n"


def test_a_process_prints_data_to_stdout_only(run_root: Path):
    done = orbaxkit_process("inspect", str(run_root), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(done.stdout)["items"]) == {"params", "train_state"}


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_what_had_to_be_assumed_is_said_once_for_people(
    run_root: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    """A3: without _METADATA, paths are made from stored names. The table notes it; beside JSON it is on stderr."""
    copy = shutil.copytree(run_root / "20/params", tmp_path / "copy")
    (copy / "_METADATA").unlink()
    assert main(["inspect", str(copy), *flags]) == 0
    out, err = capsys.readouterr()
    assert ("ambiguous" in err) == bool(flags)
    assert "ambiguous" in out
    assert err.count("warning: ") == len(flags)


def test_a_reader_that_goes_away_is_no_error(run_root: Path):
    """`orbaxkit inspect … | head -1`, with more output than a pipe holds."""
    env = os.environ | {"PYTHONPATH": str(Path(orbaxkit.__file__).parent.parent)}
    command = [sys.executable, "-m", "orbaxkit", "inspect", str(run_root), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_keys_that_the_terminal_cannot_show_are_escaped(tmp_path: Path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"größe": np.ones(2), "\x1b[31m": np.ones(2)})
    done = orbaxkit_process("inspect", str(tmp_path / "c"))
    assert done.returncode == 0
    assert "größe" in done.stdout
    assert "\\x1b[31m" in done.stdout
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(orbaxkit.__file__).parent.parent)}
    command = [sys.executable, "-m", "orbaxkit", "inspect", str(tmp_path / "c")]
    plain = subprocess.run(command, capture_output=True, env=env, check=True).stdout
    assert b"gr\\xf6\\xdfe" in plain
