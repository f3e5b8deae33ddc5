"""match: the recipes are what is to be found; nothing that is called certain or proved may be wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit._plan import open_source
from orbaxkit.cli import main
from orbaxkit.execute.gather import on_host
from orbaxkit.matching import layouts as layouts_of
from orbaxkit.matching import pairing
from orbaxkit.matching.layouts import layouts, sizes_of, turn
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.nodes import Affine, Cast, fold, reads_of

WORLDS = Path(__file__).parent.parent / "worlds"
CASES = {
    "bert_hf": (WORLDS / "tf_bundle/a_params", (), (ok.recipe("bert_hf"),)),
    "bert": (WORLDS / "tf_bundle/a_params", (), (ok.recipe("bert"), ok.rename({"params/**": "**"}))),
    "praxis": (WORLDS / "praxis/source", (), (ok.recipe("praxis"),)),
    "perceiver": (WORLDS / "perceiver/language_tiny.flatmapping.pickle", (), (ok.recipe("perceiver"),)),
    "openpi": (WORLDS / "pi05_tiny/ckpt", (ok.select("params/**"),), (ok.select("params/**"), ok.recipe("openpi"))),
}
# The least share of leaves that is right without help: by specs, and with values.
LEAST = {"bert_hf": (1, 1), "bert": (1, 1), "praxis": (0.98, 1), "perceiver": (0.98, 1), "openpi": (0.98, 1)}


@dataclass(frozen=True)
class Case:
    """Two trees, and for each leaf of the second the leaves of the first that it is made from."""

    a: Any
    b: Any
    sources: dict[str, set[str]]
    computed: set[str]  # leaves whose values the recipe changes


def case_of(name: str) -> Case:
    """A recipe as what is to be found."""
    path, before, rules = CASES[name]
    a, b = ok.restore(path, *before, as_numpy=True), ok.restore(path, *rules, as_numpy=True)
    outputs = ok.plan(path, *rules).outputs
    sources = {goal: {read.name for read in reads_of(output.expr)} for goal, output in outputs.items()}
    return Case(a, b, sources, {goal for goal, output in outputs.items() if _computes(output.expr)})


def _computes(expr):
    return fold([expr], lambda node, inner: isinstance(node, (Cast, Affine)) or any(inner))[0]


def arrays_of(tree):
    """The arrays of a tree by their paths."""
    _, source, _ = open_source(tree)
    names = [name for name, spec in source.specs.items() if spec.kind in ("array", "numpy")]
    return dict(zip(names, on_host([ex.read(name, source.specs[name]) for name in names], source), strict=True))


def judged(found, case):
    """(right, wrong, wrong though it was called certain or proved), in leaves of the goal.

    A leaf is right whose sources are, and which the transform makes bit for bit.
    """
    proposed: dict[str, tuple[set[str], set[str]]] = {}
    for pair in found.pairs:
        count = max(len(pair.ours.names), len(pair.theirs.names))
        ours = pair.ours.names if pair.how != "unstack" else pair.ours.names * count
        theirs = pair.theirs.names if pair.how != "stack" else pair.theirs.names * count
        for source, goal in zip(ours, theirs, strict=True):
            sources, sures = proposed.setdefault(goal, (set(), set()))
            sources.add(source)
            sures.add(pair.sure)
    made = arrays_of(ok.apply(case.a, found.transform)) if found.pairs else {}
    wanted = arrays_of(case.b)
    bad = [
        sures
        for goal, (sources, sures) in proposed.items()
        if sources != case.sources[goal] or not _is_made(made[goal], wanted[goal], goal in case.computed)
    ]
    return len(proposed) - len(bad), len(bad), sum("likely" not in sures for sures in bad)


def _is_made(made, wanted, is_computed):
    return made.shape == wanted.shape and (is_computed or made.tobytes() == wanted.tobytes())


@pytest.mark.parametrize("values", [False, True], ids=["specs", "values"])
@pytest.mark.parametrize("name", CASES)
def test_recipes_are_found_and_nothing_sure_is_wrong(name: str, values: bool):
    case = case_of(name)
    found = ok.match(case.a, case.b, values=values)
    right, wrong, surely = judged(found, case)
    assert surely == 0
    assert wrong == 0
    assert right >= LEAST[name][values] * len(case.sources)
    assert ok.from_json(json.loads(json.dumps(found.to_json()["transform"]))) == found.transform


def test_with_values_the_rules_make_the_other_tree():
    path, _, rules = CASES["perceiver"]
    a, b = ok.restore(path, as_numpy=True), ok.restore(path, *rules, as_numpy=True)
    found = ok.match(a, b, values=True)
    assert (found.open, found.only_in_a, found.only_in_b) == ((), (), ())
    assert not ok.diff(ok.apply(a, found.transform), b, values=True)


def test_layers_are_unstacked_and_stacked():
    rng = np.random.default_rng(0)
    stacked = {
        "layers": {
            "w": rng.random((4, 3, 5), np.float32),
            "b": rng.random((4, 5), np.float32),
            "n": rng.random((4, 2), np.float32),
        }
    }
    apart = ok.apply(stacked, ok.unstack("layers", into="block_{i}", axis=0), ok.transpose("block_*/w"))
    for a, b in ((stacked, apart), (apart, stacked)):
        for values in (False, True):
            found = ok.match(a, b, values=values)
            assert (found.open, found.only_in_a, found.only_in_b) == ((), (), ()), str(found)
            assert not ok.diff(ok.apply(a, found.transform), b, values=True)


def test_what_is_equally_good_stays_open():
    a = {"x": np.zeros((3, 3), np.float32), "y": np.zeros((3, 3), np.float32)}
    b = {"p": np.zeros((3, 3), np.float32), "q": np.zeros((3, 3), np.float32)}
    for values in (False, True):
        found = ok.match(a, b, values=values)
        assert not found.pairs
        assert {o.ours for o in found.open} == {"x", "y"}
        assert "open: x" in str(found)


@pytest.mark.parametrize("values", [False, True], ids=["specs", "values"])
def test_layers_whose_names_no_pattern_finds_alone_are_moved_leaf_by_leaf(values: bool):
    rng = np.random.default_rng(0)
    layers = [{"w": rng.random((3, 5), np.float32), "b": rng.random(5, np.float32)} for _ in range(3)]
    norms = [{"scale": rng.random(3, np.float32)} for _ in range(3)]
    haiku, plain = {}, {}
    for i, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        block = f"net/~/attention_{i}" if i else "net/~/attention"
        haiku |= {f"{block}/linear": layer, f"{block}/norm": norm}
        plain[f"attention_{i}"] = {"linear": layer, "norm": norm}
    beside = {"attention_x": {"linear": {"w": rng.random((3, 5), np.float32)}}}
    stacked = ok.apply({"net": plain}, ok.stack("net/attention_{i}", into="attention"))
    for a, b in ((haiku, {"net": plain}), ({"net": plain}, haiku), (haiku, stacked), (stacked, haiku)):
        found = ok.match(a, b, values=values)
        assert len(found.pairs) == 3, str(found)
        assert not ok.diff(ok.apply(a, found.transform), b, values=True)
    found = ok.match({"net": plain | beside}, stacked, values=True)
    assert found.only_in_a == ("net/attention_x/linear/w",)
    assert {pair.sure for pair in found.pairs} == {"proved"}


def test_thousands_of_columns_are_compared_by_size(monkeypatch: pytest.MonkeyPatch):
    """Of 3,000 leaves in 100 sizes each is compared with 30, not with 3,000."""
    compared = []
    monkeypatch.setattr(pairing, "ways", lambda a, b: compared.append(1) or layouts_of.ways(a, b))

    def tree(last):
        names = ["".join("abcdefghij"[int(digit)] for digit in f"{i:04}") for i in range(3000)]
        return {name: {last: np.zeros((2 + i % 100, 3), np.float32)} for i, name in enumerate(names)}

    assert len(ok.match(tree("kernel"), tree("weight")).pairs) == 3000
    assert len(compared) <= 3000 * 30 * 2


def test_a_bias_goes_with_its_kernel():
    def module(kernel, bias, width):
        return {kernel: np.zeros((width, 3), np.float32), bias: np.zeros(3, np.float32)}

    a = {"mlp": {"one": module("w", "b", 4), "two": module("w", "b", 5)}}
    b = {"mlp": {"x": module("kernel", "bias", 5), "y": module("kernel", "bias", 4)}}
    found = {pair.ours.pattern: (pair.theirs.pattern, pair.sure) for pair in ok.match(a, b).pairs}
    assert found["mlp/one/b"] == ("mlp/y/bias", "likely")
    assert found["mlp/two/b"] == ("mlp/x/bias", "likely")


def test_a_square_kernel_is_never_certain():
    a, b = {"kernel": np.eye(3, dtype=np.float32)}, {"weight": np.eye(3, dtype=np.float32)}
    (pair,) = ok.match(a, b).pairs
    assert (pair.layout, pair.sure) == ("i o -> o i", "likely")


def test_names_that_say_opposite_things_are_no_pair():
    a = {"layer": {"pre_attention_norm": np.zeros(3, np.float32)}}
    b = {"layer": {"post_attention_layernorm": np.zeros(3, np.float32)}}
    found = ok.match(a, b)
    assert not found.pairs
    assert [o.ours for o in found.open] == ["layer/pre_attention_norm"]


def _gpt2(rng):
    """Three layers as Flax's GPT-2 has them, and as Llama names them."""

    def block():
        return {
            "attn": {"c_attn": _dense(rng, 8, 24), "c_proj": _dense(rng, 8, 8)},
            "mlp": {"c_fc": _dense(rng, 8, 32), "c_proj": _dense(rng, 32, 8)},
        }

    return {"transformer": {"h": {str(i): block() for i in range(3)}}}


def _dense(rng, rows, columns):
    return {"kernel": rng.random((rows, columns), np.float32), "bias": rng.random(columns, np.float32)}


_H, _LAYER = "transformer/h/{i}", "model/layers/{i}"
GPT2_TO_LLAMA = ok.chain(
    ok.split("**/c_attn/{x}", into=["q_proj/{x}", "k_proj/{x}", "v_proj/{x}"], axis=-1, levels=2),
    ok.transpose("**/kernel"),
    ok.rename(
        {
            f"{_H}/attn/{{p}}_proj/{{x}}": f"{_LAYER}/self_attn/{{p}}_proj/{{x}}",
            f"{_H}/mlp/c_fc/{{x}}": f"{_LAYER}/mlp/up_proj/{{x}}",
            f"{_H}/mlp/c_proj/{{x}}": f"{_LAYER}/mlp/down_proj/{{x}}",
        }
    ),
    ok.rename({"**/self_attn/c_proj/{x}": "**/self_attn/o_proj/{x}"}),
    ok.rename({"**/kernel": "**/weight"}),
)


@pytest.mark.parametrize("values", [False, True], ids=["specs", "values"])
@pytest.mark.parametrize("is_back", [False, True], ids=["split", "concat"])
def test_what_is_packed_is_split_and_joined(is_back: bool, values: bool):
    a = _gpt2(np.random.default_rng(0))
    b = ok.apply(a, GPT2_TO_LLAMA)
    a, b = (b, a) if is_back else (a, b)
    found = ok.match(a, b, values=values)
    parts = [rule["part"] for rule in found.to_json()["rules"] if "part" in rule]
    assert sorted(part["number"] for part in parts) == [0, 0, 1, 1, 2, 2]  # of kernel and bias
    assert {part["verb"] for part in parts} == {"concat" if is_back else "split"}
    made, wanted = arrays_of(ok.apply(a, found.transform)), arrays_of(b)
    packed = [name for name in wanted if "c_attn" in name or any(f"{x}_proj" in name for x in ("q", "k", "v"))]
    assert all(made[name].tobytes() == wanted[name].tobytes() for name in (wanted if values else packed))
    assert {pair.sure for pair in found.pairs if pair.part} == {"proved" if values else "likely"}
    assert ok.from_json(json.loads(json.dumps(found.to_json()["transform"]))) == found.transform


_CHANGES = {
    "rename": ok.rename({"m/{x}/w": "n/{x}/v"}),
    "transpose": ok.transpose("*/y/*"),
    "stack": ok.stack("block_{i}", into="blocks"),
    "unstack": ok.unstack("s/x", into="x_{i}", axis=0),
    "split": ok.split("p/qkv/{x}", into=["q/{x}", "k/{x}", "v/{x}"], axis=0, levels=2),
    "concat": ok.concat(["g/a/w", "g/b/w"], into="ab", axis=1),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(_CHANGES)), unique=True), st.integers(0, 99), st.sampled_from([2, 9]))
def test_what_values_prove_is_right(names, seed, levels):
    """Few levels of values make leaves that are equal by chance: they stay open, and nothing proved is wrong."""
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return rng.integers(0, levels if rng.random() < 0.5 else 10**6, shape).astype(np.float32)

    a = {
        "m": {"x": {"w": leaf(2, 3)}, "y": {"w": leaf(2, 3)}},
        "p": {"qkv": {"w": leaf(6, 2), "u": leaf(3, 3)}},
        "g": {"a": {"w": leaf(2, 2)}, "b": {"w": leaf(2, 1)}, "c": {"w": leaf(2, 2)}},
        "s": {"x": {"w": leaf(3, 4, 2), "u": leaf(3, 1)}},
        **{f"block_{i}": {x: leaf(2, 2) for x in "abc"} for i in range(3)},
    }
    b = ok.apply(a, *(_CHANGES[name] for name in names)) if names else a
    found = ok.match(a, b, values=True)
    made, wanted = arrays_of(ok.apply(a, found.transform)) if found.pairs else {}, arrays_of(b)
    proved = {name for pair in found.pairs for name in pair.theirs.names}
    assert all(made[name].tobytes() == wanted[name].tobytes() for name in proved)
    assert proved | set(found.only_in_b) == set(wanted)


@settings(max_examples=50)
@given(st.permutations([2, 3, 5]), st.integers(0, 20))
def test_layouts_do_what_they_say(shape, seed):
    shape = tuple(shape)
    for wanted in {(shape[1], shape[0], shape[2]), (shape[0] * shape[1], shape[2]), (shape[2], shape[0] * shape[1])}:
        for layout in layouts(shape, wanted):
            x = np.random.default_rng(seed).random(shape)
            made = ok.apply(
                {"x": x}, ok.reshape("x", layout, **sizes_of(layout, wanted)) if layout else ok.cast("float64")
            )["x"]
            assert made.shape == wanted
            back = ok.reshape("x", turn(layout), **sizes_of(turn(layout), shape)) if layout else ok.cast("float64")
            np.testing.assert_array_equal(ok.apply({"x": made}, back)["x"], x)


def test_on_the_command_line_the_rules_go_on_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, _, rules = CASES["bert_hf"]
    ok.convert(path, tmp_path / "b", *rules)
    assert main(["match", str(path), str(tmp_path / "b"), "--transform", str(tmp_path / "rules.json")]) == 0
    assert "transform = ok.chain(" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "made"), "--plan", str(tmp_path / "rules.json")]) == 0
    assert not ok.diff(tmp_path / "made", tmp_path / "b", values=True)
