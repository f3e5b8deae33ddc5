"""The table of optax states against the installed optax."""

import contextlib
import importlib
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax._src import transform

from orbaxkit.states import STATES, StateClass, candidates

# NamedTuples of optax that are no part of any optimizer state.
NOT_STATES = {
    "Aggregator",
    "Aux",
    "GaLoreDimensionNumbers",
    "GradientTransformation",
    "GradientTransformationExtraArgs",
    "MuonDimensionNumbers",
}
# Made and dropped within one update, or not made by any `init`.
NEVER_INITIAL = {"BacktrackingLineSearchState", "ZoomLinesearchState", "MaskedNode", "InjectHyperparamsState"}

PARAMS = {"w": jnp.full((4, 6), 3.0), "b": jnp.full((6,), 2.0)}
# One transformation for each initial state that the public aliases do not make.
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "belief": lambda: optax.scale_by_belief(),
    "stddev with count": lambda: optax.scale_by_stddev(bias_correction=True),
    "stddev": lambda: optax.scale_by_stddev(),
    "rms with count": lambda: optax.scale_by_rms(bias_correction=True),
    "rms": lambda: optax.scale_by_rms(),
    "novograd": lambda: optax.scale_by_novograd(),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "adan": lambda: optax.adan(0.1),
    "lion": lambda: optax.lion(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "rprop": lambda: optax.rprop(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "adafactor factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lbfgs with zoom": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(3, store_grad=True),
    "sgd with momentum and schedule": lambda: optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9),
    "ema": lambda: optax.ema(0.9),
    "apply_every": lambda: optax.apply_every(2),
    "decay schedule": lambda: optax.add_decayed_weights(optax.linear_schedule(1.0, 0.0, 10)),
    "distance": lambda: transform.scale_by_distance_over_gradients(),
    "optimistic": lambda: transform.scale_by_optimistic_gradient(),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    "multisteps": lambda: optax.MultiSteps(optax.adam(0.1), 4, should_skip_update_fn=optax.skip_not_finite),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.1), lambda step, **_: step > 3),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(0.1), lambda step, **_: step > 3),
    "zero_nans": lambda: optax.zero_nans(),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "monitor": lambda: optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "partition": lambda: optax.multi_transform({"a": optax.adam(0.1), "f": optax.set_to_zero()}, {"w": "a", "b": "f"}),
    "ademamix": lambda: contrib.ademamix(0.1),
    "simplified ademamix": lambda: contrib.simplified_ademamix(0.1),
    "cocob": lambda: contrib.cocob(),
    "dadapt": lambda: contrib.dadapt_adamw(),
    "prodigy": lambda: contrib.prodigy(),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(),
    "galore": lambda: contrib.scale_by_galore(rank=2),
    "madgrad": lambda: contrib.madgrad(0.1),
    "mechanize": lambda: contrib.mechanize(optax.adam(0.1)),
    "momo": lambda: contrib.momo(0.1),
    "momo_adam": lambda: contrib.momo_adam(0.1),
    "muon": lambda: contrib.muon(0.1),
    "dpsgd": lambda: contrib.differentially_private_aggregate(1.0, 0.1, 0),
    "plateau": lambda: contrib.reduce_on_plateau(),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "sophia": lambda: contrib.sophia(0.1),
    "complex": lambda: contrib.split_real_and_imaginary(optax.adam(0.1)),
}


def _aggregating() -> dict[str, Callable[[], Any]]:
    """optax.experimental.aggregating is of 0.2.7; older releases have no such states either."""
    try:
        from optax.experimental import _aggregating
    except ImportError:
        return {}
    return {
        "averaging": lambda: _aggregating.average_incrementally_updates(0, 4),
        "statistics": lambda: _aggregating.get_per_element_mean_and_sum_sq_diff_grads(None, 4),
        "statistics ema": lambda: _aggregating.track_per_element_mean_and_variance_with_ema(0.9),
    }


@cache
def _optax_tuples() -> dict[str, type]:
    """Every NamedTuple class that the installed optax defines."""
    root = pathlib.Path(optax.__file__).parent
    files = [path for path in root.rglob("*.py") if "test" not in path.stem]
    names = [".".join(("optax", *path.relative_to(root).with_suffix("").parts)) for path in files]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(name.removesuffix(".__init__")) for name in names]
        values = [value for module in modules for value in vars(module).values()]
    tuples = [v for v in values if isinstance(v, type) and issubclass(v, tuple) and hasattr(v, "_fields")]
    return {cls.__name__: cls for cls in tuples if cls.__module__.startswith("optax.")}


def test_every_state_of_the_installed_optax_is_in_the_table():
    """A class or a field that is missing here would be shown as an unknown node."""
    table = {(state.name, tuple(state.fields)) for state in STATES}
    found = {(name, cls._fields) for name, cls in _optax_tuples().items() if name not in NOT_STATES}
    assert len(found) >= 50
    assert found - table == set()


@pytest.mark.parametrize("state", [s for s in STATES if not s.is_old], ids=str)
def test_a_class_is_where_the_table_says(state: StateClass):
    if state.name not in _optax_tuples():
        pytest.skip(f"optax {optax.__version__} has no {state.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls = getattr(importlib.import_module(state.module), state.name)
    assert cls._fields in {tuple(entry.fields) for entry in STATES if entry.name == state.name}


def _states_in(tree: Any) -> Iterator[Any]:
    """Every optax NamedTuple of a state, outer ones first."""
    if hasattr(tree, "_fields") and type(tree).__module__.startswith("optax."):
        yield tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    for child in children:
        yield from _states_in(child)


def _initial_states() -> list[Any]:
    found = []
    for make in {**TRANSFORMS, **_aggregating()}.values():
        with contextlib.suppress(AttributeError):  # an optax that has not got it yet
            found += _states_in(make().init(PARAMS))
    found += _states_in(optax.LookaheadParams.init_synced(PARAMS))
    return [*found, *_states_in(contrib.split_real_and_imaginary(_copying()).init({"z": jnp.ones(3, jnp.complex64)}))]


def _copying() -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))


@pytest.fixture(scope="module")
def initial_states() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _initial_states()


def test_every_class_that_init_makes_is_checked(initial_states):
    """No entry of the table stays unproved, but for those which no `init` makes."""
    made = {type(state).__name__ for state in initial_states}
    wanted = {state.name for state in STATES if not state.is_old} - NEVER_INITIAL
    installed = set(_optax_tuples())
    assert (wanted & installed) - made == set()


def test_initial_values_are_what_init_gives(initial_states):
    """What the table calls zero, a constant or a copy of the params is that, leaf by leaf."""
    wrong = [problem for state in initial_states for problem in _problems(state)]
    assert wrong == []


def _problems(state: Any) -> Iterator[str]:
    entry = next(e for e in STATES if e.name == type(state).__name__ and tuple(e.fields) == state._fields)
    for name, known in entry.fields.items():
        leaves = [np.asarray(x) for x in jax.tree.leaves(getattr(state, name)) if not _is_key(x)]
        where = f"{entry.name}.{name}: {known.initial} {known.value}"
        if known.initial == "zero" and any(np.any(x) for x in leaves):
            yield where
        if known.initial == "params" and leaves and not _equals_params(getattr(state, name)):
            yield where
        if known.initial == "constant" and known.value is not None and not _is_all(leaves, known.value):
            yield where
        if known.layout == "params" and leaves and not _has_params_shapes(getattr(state, name)):
            yield f"{where}: not of the params' shapes"
        if known.layout == "memory" and {x.shape[1:] for x in leaves} != {(6,), (4, 6)}:
            yield f"{where}: no memory"
        if known.layout == "none" and known.role in ("count", "key") and any(x.shape not in ((), (2,)) for x in leaves):
            yield f"{where}: no scalar"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_all(leaves: list[np.ndarray], value: float) -> bool:
    return all(np.allclose(x.astype(np.float64), value, rtol=1e-4, atol=0) for x in leaves)


def _equals_params(tree: Any) -> bool:
    kept = {"w": tree["w"], "b": tree["b"]}
    return all(np.array_equal(kept[key], PARAMS[key]) for key in PARAMS)


def _has_params_shapes(tree: Any) -> bool:
    """Masked, projected and complex params have fewer or other leaves: only whole plain trees are compared."""
    shapes = {np.shape(x) for x in jax.tree.leaves(tree)}
    return shapes <= {(6,), (4, 6), (4, 2), (), (3,)}


AMBIGUOUS = {
    "count mu nu": ["ScaleByAdamState", "ScaleByBeliefState", "ScaleByNovogradState", "ScaleByRStdDevWithCountState"],
    "mu nu": ["ScaleByRStdDevState", "ScaleBySM3State"],
    "count": ["ScaleByScheduleState", "WrappedScheduleState", "WeightDecaySchedule"],
    "inner_state": ["MaskedState", "SplitRealAndImaginaryState"],
    "inner_state step": ["ConditionallyTransformState", "ConditionallyMaskState", "MaybeUpdateState"],
    "": ["EmptyState", "MaskedNode"],
    "learning_rate value grad info": ["ScaleByZoomLinesearchState", "ScaleByBacktrackingLinesearchState"],
    "inner_states": ["PartitionState", "MultiTransformState"],
}


@pytest.mark.parametrize("fields", AMBIGUOUS, ids=lambda fields: fields or "none")
def test_ambiguous_field_sets_name_their_default_first(fields: str):
    assert [state.name for state in candidates(frozenset(fields.split()))] == AMBIGUOUS[fields]


def test_the_ambiguous_field_sets_are_all_listed():
    sets: dict[frozenset[str], int] = {}
    for state in STATES:
        sets[frozenset(state.fields)] = sets.get(frozenset(state.fields), 0) + 1
    assert {key for key, number in sets.items() if number > 1} == {frozenset(key.split()) for key in AMBIGUOUS}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ("mini_step gradient_step acc_grads", "MultiStepsState"),
        ("count hyperparams", "InjectStatefulHyperparamsState"),
        ("first_step init_params estim_dist sum_sq_norm_grads", "DoGState"),
        ("lr best_loss plateau_count cooldown_counter", "ReduceLROnPlateauState"),
        ("steps_since_sync opt_state", None),
    ],
    ids=["no inner leaves", "no inner leaves (inject)", "old names", "old names (plateau)", "adv_state and cache lost"],
)
def test_older_forms_and_states_without_inner_leaves_are_known(fields: str, name: str | None):
    found = candidates(frozenset(fields.split()))
    assert (found[0].name if found else None) == (name or "SAMState")


def test_the_table_imports_no_jax():
    code = "import sys, orbaxkit.slots; print(sorted({'jax', 'flax', 'optax', 'orbax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_yogi_is_an_adam_state_that_starts_elsewhere():
    """The note of the table's Adam entry: a reset cannot know which of the two it was."""
    state = optax.scale_by_yogi().init(PARAMS)
    assert type(state).__name__ == "ScaleByAdamState"
    assert {float(x.ravel()[0]) for x in jax.tree.leaves((state.mu, state.nu))} == {float(np.float32(1e-6))}
    assert "1e-6" in next(entry.note for entry in STATES if entry.name == "ScaleByAdamState")
