"""Where the params are."""

import pytest

from orbaxkit._params import find_params
from orbaxkit.errors import CheckpointError
from orbaxkit.paths import format_path, parse_path
from orbaxkit.specs import DTYPES, LeafSpec, Specs


def specs(*names: str) -> Specs:
    def typed(name: str) -> tuple[str | int, ...]:
        return tuple(int(part[1:]) if part.startswith("#") else part for part in parse_path(name))

    return Specs.of((typed(name), LeafSpec((2,), DTYPES["float32"])) for name in names)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["params/w", "opt_state/#0/mu/w", "step"], "params"),
        (["params/params/w", "params/batch_stats/m"], "params/params"),
        (["state/params/w", "state/opt_state/#0/mu/w"], "state/params"),
        (["model/l/kernel/value", "opt_state/#0/mu/l", "step"], "model"),
        (["#0/l/kernel/value", "#1/opt_state/#0/mu/l", "#1/step/value"], "0"),
        (["dense/kernel", "dense/bias"], ""),
        (["params/params/w", "train_state/opt_state/#0/mu/w", "train_state/step"], "params/params"),
        (["params/w", "opt_state/inner/params/w"], "params"),
        (["net/w", "adam/count", "adam/mu/w", "adam/nu/w"], "net"),
        (["net/w", "step"], "net"),
    ],
    ids=[
        "train state",
        "linen variables",
        "nested",
        "nnx",
        "nnx tuple",
        "bare",
        "openpi",
        "params in an optimizer",
        "moments by fields",
        "step",
    ],
)
def test_the_usual_trees(names, found):
    assert format_path(find_params(specs(*names)).path) == found


@pytest.mark.parametrize(
    "names",
    [
        ["params/w", "ema_params/w", "step"],
        ["params/params/w", "train_state/params/w", "train_state/opt_state/#0/mu/w"],
    ],
    ids=["beside", "openpi"],
)
def test_averaged_and_live_params_need_a_choice(names):
    with pytest.raises(CheckpointError, match="several subtrees") as error:
        find_params(specs(*names))
    assert len(error.value.leaves) == 2
    assert 'which="ema"' in str(error.value)
    assert find_params(specs(*names), "ema").path != find_params(specs(*names), "raw").path
    assert find_params(specs(*names), "ema").is_ema


def test_several_candidates_are_listed():
    with pytest.raises(CheckpointError, match="several subtrees") as error:
        find_params(specs("#0/mean", "#1/params/w", "#2/params/w"))
    assert [name for name, _ in error.value.leaves] == ["1/params", "2/params"]


def test_no_params_says_what_there_is():
    with pytest.raises(CheckpointError, match="no params in this checkpoint; at its top: opt_state, step"):
        find_params(specs("opt_state/#0/mu/w", "step"))
    with pytest.raises(CheckpointError, match="no ema params"):
        find_params(specs("params/w"), "ema")
