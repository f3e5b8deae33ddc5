"""Optimizer states found by their field names alone."""

import json
import pathlib
from collections.abc import Iterable

import numpy as np
import pytest

from orbaxkit.paths import KeyPath
from orbaxkit.slots import describe_slots, find_slots, mirrored_params, mirrored_root
from orbaxkit.specs import DTYPES, LeafSpec, Specs

NONE = LeafSpec(kind="empty", empty="None")
COUNT = LeafSpec((), DTYPES["int32"])


def array(*shape: int) -> LeafSpec:
    return LeafSpec(shape, DTYPES["float32"])


def tree(leaves: dict[str, LeafSpec], indices: bool = True) -> Specs:
    """Specs by path text; numbers are sequence indices (Linen), or mapping keys (NNX)."""

    def path(text: str) -> KeyPath:
        return tuple(int(p) if indices and p.isdigit() else p for p in text.split("/"))

    return Specs.of([(path(text), spec) for text, spec in leaves.items()])


def moments(
    prefix: str, names: Iterable[str], fields: Iterable[str] = ("mu", "nu"), end: str = ""
) -> dict[str, LeafSpec]:
    return {f"{prefix}/{field}/{name}{end}": array(4, 8) for field in fields for name in names}


PARAMS = {"params/dense/kernel": array(4, 8), "params/head/kernel": array(4, 8)}
NAMES = ["dense/kernel", "head/kernel"]
ADAM = {"opt_state/1/0/count": COUNT, **moments("opt_state/1/0", NAMES)}


def test_pi05_train_state_shows_its_slots():
    """The names and write shapes of a real pi0.5 train state: a frozen language model, params in another item."""
    rows = json.loads((pathlib.Path(__file__).parent / "golden" / "pi05_write_shapes.json").read_text())
    specs = tree({name.replace(".", "/"): array(*shape) for name, shape in rows.items()}, indices=False)
    assert "; ".join(describe_slots(specs)) == (
        "opt_state/1/0 Adam-like (count, mu, nu): moments for 31 params, 416,969,488 values each; "
        "opt_state/1/2 schedule-like (count); no params in this item"
    )


def test_moments_of_frozen_params_are_missing():
    frozen = {"params/llm/kernel": array(64, 8), "step": COUNT}
    assert describe_slots(tree({**PARAMS, **frozen, **ADAM})) == [
        "opt_state/1/0 Adam-like (count, mu, nu): moments for 2 of 3 params, 64 values each"
    ]


def test_A30_linen_chain_has_none_for_its_empty_states():
    specs = tree({**PARAMS, "opt_state/0": NONE, **ADAM, "opt_state/1/1": NONE, "opt_state/1/2": NONE})
    (slot,) = find_slots(specs)
    assert (slot.path, slot.key_path, slot.default.name) == ("opt_state/1/0", ("opt_state", 1, 0), "ScaleByAdamState")
    assert slot.mirrors["nu"] == ("opt_state/1/0/nu/dense/kernel", "opt_state/1/0/nu/head/kernel")
    assert slot.leaves["count"] == ("opt_state/1/0/count",)
    assert slot.param_of(specs, "opt_state/1/0/nu/head/kernel") == ("head", "kernel")


@pytest.mark.parametrize("end", ["", "/value"], ids=["count", "count.value"])
def test_nnx_states_have_string_indices_and_value_ends(end: str):
    leaves = {f"model/{name}/value": array(4, 8) for name in NAMES}
    leaves |= {f"optimizer/opt_state/0/count{end}": COUNT, **moments("optimizer/opt_state/0", NAMES, end="/value")}
    specs = tree(leaves, indices=False)
    (slot,) = find_slots(specs)
    assert slot.key_path == ("optimizer", "opt_state", "0")
    assert mirrored_params(specs, slot) == (("dense", "kernel"), ("head", "kernel"))
    assert mirrored_root(specs, [slot]) == ("model",)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({}, ["ScaleByAdamState", "ScaleByBeliefState", "ScaleByRStdDevWithCountState"]),
        ({"nu": ()}, ["ScaleByNovogradState"]),
    ],
    ids=["nu of the params' shape", "one number per param"],
)
def test_shapes_narrow_the_candidates(shapes: dict[str, tuple[int, ...]], expected: list[str]):
    changed = {
        name: LeafSpec(shapes[name.split("/")[3]], DTYPES["float32"]) if name.split("/")[3] in shapes else spec
        for name, spec in ADAM.items()
    }
    (slot,) = find_slots(tree({**PARAMS, **changed}))
    assert [state.name for state in slot.candidates] == expected
    assert slot.is_ambiguous == (len(expected) > 1)


def test_sm3_is_told_from_rmsprop_by_one_accumulator_per_axis():
    sm3 = {f"opt_state/0/mu/{name}/{axis}": array(size) for name in NAMES for axis, size in enumerate((4, 8))}
    specs = tree({**PARAMS, **sm3, **moments("opt_state/0", NAMES, ["nu"])})
    assert [state.name for state in find_slots(specs)[0].candidates] == ["ScaleBySM3State"]


def test_wrappers_show_their_inner_states():
    """multi_transform: the label lies between; a masked part has None where it sees no param."""
    prefix = "opt_state/inner_states"
    specs = tree(
        {
            **PARAMS,
            f"{prefix}/x/inner_state/0/count": COUNT,
            **moments(f"{prefix}/x/inner_state/0", NAMES[:1]),
            **{f"{prefix}/x/inner_state/0/{slot}/head/kernel": NONE for slot in ("mu", "nu")},
            f"{prefix}/y/inner_state/0/trace/head/kernel": array(4, 8),
            f"{prefix}/y/inner_state/0/trace/dense/kernel": NONE,
        }
    )
    assert describe_slots(specs) == [
        "opt_state partition-like (inner_states)",
        "opt_state/inner_states/x masked-like (inner_state)",
        "opt_state/inner_states/x/inner_state/0 Adam-like (count, mu, nu): moments for 1 of 2 params, 32 values each",
        "opt_state/inner_states/y masked-like (inner_state)",
        "opt_state/inner_states/y/inner_state/0 momentum-like (trace): moments for 1 of 2 params, 32 values",
    ]


def test_a_bare_optimizer_state_needs_no_name():
    """The item is the state itself: what surrounds or follows a telling state in its chain is found with it."""
    specs = tree({"inner_state/0/count": COUNT, **moments("inner_state/0", NAMES), "inner_state/2/count": COUNT})
    assert [(slot.path, slot.default.label) for slot in find_slots(specs)] == [
        ("", "masked"),
        ("inner_state/0", "Adam"),
        ("inner_state/2", "schedule"),
    ]


@pytest.mark.parametrize(
    "leaves",
    [
        {"params/attention/key/kernel": array(4, 8)},
        {"params/vae/mu/kernel": array(4, 8), "params/vae/nu/kernel": array(4, 8)},
        {"params/norm/count": COUNT, "params/norm/mu/x": array(4), "params/norm/nu/x": array(4)},
        {"batch_stats/norm/count": COUNT, "batch_stats/norm/mean": array(4)},
        {"rngs/count": COUNT, "rngs/key": LeafSpec((), DTYPES["uint32"], "key")},
        {"trace/w": array(4)},
        {"step": COUNT, "params/w": array(4)},
        {},
    ],
    ids=["attention key", "vae", "inside params", "batch stats", "rngs", "trace", "step", "nothing"],
)
def test_what_only_looks_like_a_state_is_left_alone(leaves: dict[str, LeafSpec]):
    assert find_slots(tree(leaves)) == ()


def test_a_param_named_like_a_field_is_no_state_of_its_own():
    specs = tree({"opt_state/0/trace/attention/key/kernel": array(4), "opt_state/0/trace/count": array(4)})
    assert [slot.path for slot in find_slots(specs)] == ["opt_state/0"]


def test_params_are_found_by_their_paths():
    """Two trees fit: the one named params is preferred to its average."""
    average = {name.replace("params/", "ema_params/"): spec for name, spec in PARAMS.items()}
    specs = tree({**average, **PARAMS, **ADAM})
    assert mirrored_root(specs, find_slots(specs)) == ("params",)


def test_control_characters_in_keys_are_escaped():
    specs = tree({"opt_state/\x1b[31m/count": COUNT, **moments("opt_state/\x1b[31m", NAMES)})
    assert describe_slots(specs)[0].startswith("opt_state/\\x1b[31m Adam-like")


def test_scalars_and_numpy_counts_are_values_too():
    specs = tree({"opt_state/0/count": LeafSpec((), np.dtype("int64"), "scalar"), **moments("opt_state/0", NAMES)})
    assert find_slots(specs)[0].leaves["count"] == ("opt_state/0/count",)
