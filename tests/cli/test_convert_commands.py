"""`convert`, `diff`, `verify` and `reset-optimizer` as people run them: output, errors, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import f1_tree, f6_tree, save

import orbaxkit as ok
from orbaxkit.cli import main
from orbaxkit.cli.progress import Lines


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("commands") / "in", {"params": f6_tree(), "step": 3})


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    return (code, *capsys.readouterr())


def test_convert_writes_and_prints_the_path_alone(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "convert", saved, tmp_path / "out", "--select", "params/**", "--select", "step")
    assert (code, out) == (0, f"{tmp_path}/out\n")
    assert err.splitlines()[-1].startswith("writing 100 %  ")
    assert not ok.diff(saved, tmp_path / "out", values=True)


FLAGS = {
    "select": (["--select", "params/**"], (ok.select("params/**"),)),
    "drop": (["--drop", "step", "--drop", "params/embed"], (ok.drop("step", "params/embed"),)),
    "rename": (["--rename", "params/**=model/**"], (ok.rename({"params/**": "model/**"}),)),
    "unstack": (["--unstack", "params/layers=l_{i}@1"], (ok.unstack("params/layers", into="l_{i}", axis=1),)),
    "cast": (["--cast", "bfloat16"], (ok.cast("bfloat16"),)),
    "cast by pattern": (["--cast", "params/embed=float16"], (ok.cast("float16", "params/embed"),)),
    "in order": (
        ["--unstack", "params/layers=l_{i}@1", "--stack", "params/l_{i}=layers@0", "--drop", "step"],
        (
            ok.unstack("params/layers", into="l_{i}", axis=1),
            ok.stack("params/l_{i}", into="layers", axis=0),
            ok.drop("step"),
        ),
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_the_transforms_of_the_api(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags, transforms = FLAGS[name]
    assert run(capsys, "convert", saved, tmp_path / "out", *flags)[0] == 0
    assert not ok.diff(saved, tmp_path / "out", *transforms, values=True)


@pytest.mark.parametrize("of", ["plan", "transform"])
def test_a_plan_is_read_from_json(of: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rule = ok.chain(ok.select("params/**"), ok.transpose("params/embed"))
    data = rule.to_json() if of == "transform" else ok.plan(ok.open(saved), rule).to_json()
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert run(capsys, "convert", saved, tmp_path / "out", "--plan", tmp_path / "plan.json")[0] == 0
    assert not ok.diff(saved, tmp_path / "out", rule, values=True)


def test_a_plan_for_another_checkpoint_is_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = ok.plan(ok.open(save(tmp_path / "other", {"params": {"embed": np.ones(3)}})))
    (tmp_path / "plan.json").write_text(json.dumps(other.to_json()))
    code, out, err = run(capsys, "convert", saved, tmp_path / "out", "--plan", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: the plan was made for another checkpoint\n"
        "  params/embed: float32[10, 8], the plan was made for float64[3]"
    )


def test_a_dry_run_prints_the_plan_and_the_bytes_and_writes_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, out, err = run(capsys, "convert", saved, tmp_path / "out", "--cast", "bfloat16", "--dry-run")
    assert (code, err) == (0, "")
    assert "~ params/embed = bfloat16(params/embed)" in out
    assert "to be written: 4 leaves, 1,256 bytes decoded" in out
    assert list(tmp_path.iterdir()) == []
    code, out, _ = run(capsys, "convert", saved, tmp_path / "out", "--dry-run", "--json")
    assert json.loads(out)["output_bytes"] == 2504
    assert list(tmp_path.iterdir()) == []


def test_convert_to_safetensors_by_name_and_to_a_step(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        run(capsys, "convert", saved, tmp_path / "x.safetensors", "--json")[1]
        == json.dumps({"path": str(tmp_path / "x.safetensors")}) + "\n"
    )
    assert run(capsys, "convert", tmp_path / "x.safetensors", tmp_path / "run", "--as-step", 5)[0] == 0
    assert ok.open(tmp_path / "run").steps == (5,)
    assert run(capsys, "diff", saved, tmp_path / "run", "--values")[0] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rename", "params"], "error: --rename 'params' has no two sides\nhint: --rename 'OLD=NEW'\n"),
        (["--unstack", "params/layers=l_{i}@x"], "error: --unstack: the axis 'x' is no number\n"),
        (["--plan", "/nowhere.json"], "error: the plan nowhere.json cannot be read: No such file or directory\n"),
        (["--select", "nothing/**"], "error: a pattern matches no leaf\n  nothing/**: matches nothing"),
        (["--memory-limit", "x"], "error: memory_limit: 'x' is no size\n"),
    ],
    ids=["sides", "axis", "plan", "pattern", "size"],
)
def test_usage_errors_are_one_message_and_exit_2(
    flags: list[str], message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, out, err = run(capsys, "convert", saved, tmp_path / "out", *flags)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_diff_exits_1_on_a_difference_and_0_on_none(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = save(tmp_path / "b", {"params": f6_tree(), "step": 4})
    code, out, err = run(capsys, "diff", saved, other)
    assert (code, err) == (0, "")
    assert out.endswith("values were not compared (values=True, --values)\n")
    code, out, _ = run(capsys, "diff", saved, other, "--values")
    assert code == 1
    assert "  step  3 in a, 4 in b\n" in out
    assert run(capsys, "diff", saved, other, "--values", "--atol", "1")[0] == 0
    code, out, _ = run(capsys, "diff", saved, other, "--values", "--json")
    assert (code, [each["path"] for each in json.loads(out)["values"]]) == (1, ["step"])
    assert run(capsys, "diff", saved, other, "--atol", "1")[0] == 2
    assert run(capsys, "diff", saved, tmp_path / "nothing")[0] == 2


def test_verify_exits_1_on_damage_and_2_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = save(tmp_path / "a", {"w": np.random.default_rng(0).standard_normal(9000)})
    assert run(capsys, "verify", path, "--hash")[0] == 0
    file = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    os.truncate(file, 5000)
    code, out, err = run(capsys, "verify", path)
    assert (code, err) == (1, "")
    assert out.split("\n")[1] == "damaged: 1 finding"
    code, out, _ = run(capsys, "verify", path, "--json")
    assert (code, json.loads(out)["is_ok"]) == (1, False)
    assert run(capsys, "verify", tmp_path / "nothing")[0] == 2


# reset-optimizer.


def trained(tx: optax.GradientTransformation, params: Any) -> Any:
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return state


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    params = f1_tree()["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)))
    tree = {"params": params, "opt_state": trained(tx, params), "step": 3}
    return save(tmp_path_factory.mktemp("adam") / "in", tree), tx, params


def test_a_reset_optimizer_is_that_of_init(adam: tuple[Path, Any, Any], tmp_path: Path, capsys: Any):
    path, tx, params = adam
    code, out, err = run(capsys, "reset-optimizer", path, tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path}/out\n")
    assert "opt_state/1/0 is taken for Adam's; scale_by_yogi stores this class too" in err
    wanted = {"params": params, "opt_state": tx.init(params), "step": 0}
    found = ok.restore(tmp_path / "out", target=wanted)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((jnp.asarray(x) == jnp.asarray(y)).all()), found, wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_keep_and_only_say_what_stays(adam: tuple[Path, Any, Any], tmp_path: Path, capsys: Any):
    path, _, _ = adam
    assert run(capsys, "reset-optimizer", path, tmp_path / "a", "--keep", "step", "--keep", "schedule")[0] == 0
    changed = ok.diff(path, tmp_path / "a", values=True).values or ()
    assert {each.name.rsplit("/", 2)[0] for each in changed} == {"opt_state/1", "opt_state/1/0/mu", "opt_state/1/0/nu"}
    assert run(capsys, "reset-optimizer", path, tmp_path / "b", "--only", "schedule")[0] == 0
    assert [each.name for each in ok.diff(path, tmp_path / "b", values=True).values or ()] == ["opt_state/1/2/count"]


def test_counts_are_not_parted_from_their_moments(adam: tuple[Path, Any, Any], tmp_path: Path, capsys: Any):
    path, _, _ = adam
    code, _, err = run(capsys, "reset-optimizer", path, tmp_path / "out", "--only", "mu", "--only", "nu")
    assert code == 2
    assert "counts and moments would not belong together" in err
    code, _, err = run(capsys, "reset-optimizer", path, tmp_path / "out", "--only", "trace")
    assert code == 2
    assert "trace: means nothing in this optimizer state" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tx", "named"),
    [
        (
            optax.contrib.prodigy(),
            ["params0 of Prodigy starts as a copy of the params", "estim_lr of Prodigy starts at 1e-06"],
        ),
        (optax.adagrad(1.0), ["sum_of_squares of AdaGrad starts at 0.1 (initial_accumulator_value), not at zero"]),
        (optax.rprop(1.0), ["step_sizes of Rprop starts at what an argument says (learning_rate), not at zero"]),
        (optax.contrib.cocob(), ["scale of COCOB starts at 1e-08 (eps), not at zero"]),
    ],
    ids=["prodigy", "adagrad", "rprop", "cocob"],
)
def test_what_does_not_start_at_zero_is_refused_by_name(tx: Any, named: list[str], tmp_path: Path, capsys: Any):
    params = {"w": jnp.ones((2, 3))}
    path = save(tmp_path / "in", {"params": params, "opt_state": trained(tx, params), "step": 3})
    code, out, err = run(capsys, "reset-optimizer", path, tmp_path / "out")
    assert (code, out) == (2, "")
    assert "not everything in this optimizer state is known to start at zero" in err
    for text in named:
        assert text in err
    assert "hint: keep it: --keep " in err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_reset_writes_nothing(adam: tuple[Path, Any, Any], tmp_path: Path, capsys: Any):
    code, out, _ = run(capsys, "reset-optimizer", adam[0], tmp_path / "out", "--dry-run")
    assert code == 0
    assert "+ opt_state/1/{0,2}/count = 0" in out
    assert list(tmp_path.iterdir()) == []


# Progress.


def test_progress_is_one_line_per_tenth(capsys: pytest.CaptureFixture[str]):
    times = iter(range(100))
    lines = Lines("writing", clock=lambda: next(times))
    for done in range(0, 901, 9):
        lines(done, 900)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert told[4] == "writing 50 %  450 B of 900 B  90 B/s  0:05 left"


def test_convert_imports_no_jax(saved: Path, tmp_path: Path):
    code = (
        "import sys; from orbaxkit.cli import main; "
        f"main(['convert', {str(saved)!r}, {str(tmp_path / 'out')!r}]); "
        "print([name for name in ('jax', 'flax', 'orbax', 'optax', 'rich') if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(Path(ok.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_recipes_go_by_name_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bundle = Path(__file__).parent.parent / "worlds/tf_bundle/b_adam"
    assert run(capsys, "convert", bundle, tmp_path / "flax", "--recipe", "bert")[0] == 0
    assert run(capsys, "convert", tmp_path / "flax", tmp_path / "back", "--recipe", "bert:inverse")[0] == 0
    assert run(capsys, "diff", bundle, tmp_path / "back", "--values")[0] == 0
    code, _, err = run(capsys, "convert", bundle, tmp_path / "no", "--recipe", "brt")
    assert code == 2
    assert "one of bert, bert_hf, openpi" in err
    code, _, err = run(capsys, "convert", bundle, tmp_path / "no", "--recipe", "openpi:vision_heads")
    assert code == 2
    assert "cannot be read at 'vision_heads'" in err
