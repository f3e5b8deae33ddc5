"""The table of optax states: what each field is and where it starts.

The table holds every state NamedTuple of optax 0.2 (a test compares it with the installed release). Checkpoints keep
field names but rarely class names, so a node is known by its set of fields; where several classes share one, the first
of the table is the default and all of them are candidates.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Role = Literal["count", "moment", "params-like", "accumulator", "scalar", "key", "inner state"]
Initial = Literal["zero", "params", "constant", "inner", "unknown"]
Layout = Literal["none", "params", "per leaf", "per axis", "factored", "memory", "other"]


@dataclass(frozen=True, slots=True)
class StateField:
    """What a field is and what `tx.init` puts there.

    Initial values: `zero` (False too), `params` (a copy), `constant` (`value`, or None where only an argument tells),
    `inner` (the inner states' own), `unknown` (depends on arguments and params); `argument` names the constructor's
    argument that sets it (`value`, or zero, is its default). Layouts: `params` (a tree of the params' shapes),
    `per leaf` (one number for each param), `per axis` (SM3's), `factored` (Adafactor's), `memory` (the params' shapes
    behind one more axis), `other`, `none` (no such tree).
    """

    role: Role
    initial: Initial = "zero"
    layout: Layout = "none"
    value: float | int | None = None
    argument: str | None = None
    is_optional: bool = False  # may be None or hold no leaf at all


@dataclass(frozen=True, slots=True)
class StateClass:
    """One state class: where optax 0.2 has it, how people call it, its fields in order, and what else to know."""

    module: str
    name: str
    label: str
    fields: Mapping[str, StateField]
    note: str = ""
    is_old: bool = False  # a form, or a name, of earlier 0.2 releases

    def __str__(self) -> str:
        return self.name


COUNT = StateField("count")
MOMENT = StateField("moment", layout="params")
SUM = StateField("accumulator", layout="params")
COPY = StateField("params-like", "params", "params")
ZERO = StateField("scalar")
KEY = StateField("key", "unknown")
INNER = StateField("inner state", "inner", is_optional=True)
UNKNOWN = StateField("scalar", "unknown", is_optional=True)
FLAG = StateField("scalar", "constant", value=True)
FACTORED = StateField("moment", layout="factored")
MEMORY = StateField("accumulator", layout="memory")
GRADIENT = StateField("accumulator", layout="params", is_optional=True)
TREE = StateField("params-like", "unknown", "params")


def _constant(value: float | int | None, argument: str | None = None, role: Role = "scalar") -> StateField:
    return StateField(role, "constant", value=value, argument=argument, is_optional=value is None)


def _filled(value: float | int | None, argument: str) -> StateField:
    return StateField("accumulator", "constant", "params", value, argument)


_ZOOM = (
    "count params updates stepsize_guess stepsize value grad slope value_init slope_init decrease_error "
    "curvature_error error interval_found done failed low value_low slope_low high value_high slope_high "
    "cubic_ref value_cubic_ref safe_stepsize safe_value safe_grad"
)


def _table() -> Iterator[StateClass]:
    def state(name: str, label: str, fields: Mapping[str, StateField], note: str = "", old: bool = False) -> StateClass:
        return StateClass(module, name, label, fields, note, old)

    module = "optax"
    adam = {"count": COUNT, "mu": MOMENT, "nu": MOMENT}
    yogi = "scale_by_yogi stores this class too, with mu and nu starting at 1e-6"
    yield state("ScaleByAdamState", "Adam", adam, yogi)
    yield state("ScaleByBeliefState", "AdaBelief", adam)
    norms = StateField("moment", layout="per leaf")
    yield state("ScaleByNovogradState", "NovoGrad", {"count": COUNT, "mu": MOMENT, "nu": norms})
    scale = StateField("moment", layout="params", argument="initial_scale")
    module = "optax._src.transform"
    yield state("ScaleByRStdDevWithCountState", "centred RMSProp", {"count": COUNT, "mu": MOMENT, "nu": scale})
    yield state("ScaleByRmsWithCountState", "RMSProp", {"count": COUNT, "nu": scale})
    module = "optax"
    yield state("ScaleByRStdDevState", "centred RMSProp", {"mu": MOMENT, "nu": scale})
    per_axis = StateField("moment", layout="per axis")
    yield state("ScaleBySM3State", "SM3", {"mu": per_axis, "nu": MOMENT})
    yield state("ScaleByRmsState", "RMSProp", {"nu": scale})
    yield state("ScaleByAmsgradState", "AMSGrad", {**adam, "nu_max": MOMENT})
    yield state("ScaleByLionState", "Lion", {"count": COUNT, "mu": MOMENT})
    yield state("ScaleByAdaDeltaState", "AdaDelta", {"e_g": MOMENT, "e_x": MOMENT})
    yield state("ScaleByAdanState", "Adan", {**dict.fromkeys("mvn", MOMENT), "g": SUM, "t": COUNT})
    yield state("ScaleByRssState", "AdaGrad", {"sum_of_squares": _filled(0.1, "initial_accumulator_value")})
    yield state("ScaleByRpropState", "Rprop", {"step_sizes": _filled(None, "learning_rate"), "prev_updates": SUM})
    factored = {"count": COUNT, "v_row": FACTORED, "v_col": FACTORED, "v": FACTORED}
    yield state("FactoredState", "Adafactor", factored)
    memories = {"diff_params_memory": MEMORY, "diff_updates_memory": MEMORY, "weights_memory": ZERO}
    params = StateField("params-like", "zero", "params")
    yield state("ScaleByLBFGSState", "L-BFGS", {"count": COUNT, "params": params, "updates": SUM, **memories})
    yield state("TraceState", "momentum", {"trace": MOMENT})
    yield state("EmaState", "EMA", {"count": COUNT, "ema": MOMENT})
    yield state("ApplyEvery", "gradient accumulation", {"count": COUNT, "grad_acc": SUM})
    yield state("ScaleByScheduleState", "schedule", {"count": COUNT})
    module = "optax.schedules._inject"
    yield state("WrappedScheduleState", "schedule", {"count": COUNT})
    module = "optax.transforms._adding"
    yield state("WeightDecaySchedule", "weight decay schedule", {"count": COUNT})
    module = "optax._src.transform"
    distance = StateField("scalar", "unknown", "per leaf")
    squares = StateField("accumulator", layout="per leaf")
    dog = {"max_dist": distance, "grad_sum_of_squares": squares, "init_params": COPY}
    yield state("ScaleByDistanceOverGradientsState", "distance over gradients", dog)
    yield state("ScaleByOptimisticGradientState", "optimistic", {"is_initial_step": FLAG, "previous_gradient": SUM})

    module = "optax"
    yield state("EmptyState", "empty", {})
    yield state("MaskedNode", "masked", {}, "stands for a param that this part of the optimizer does not see")
    yield state("MaskedState", "masked", {"inner_state": INNER})
    module = "optax.transforms"
    yield state("PartitionState", "partition", {"inner_states": INNER})
    module = "optax"
    yield state("MultiTransformState", "partition", {"inner_states": INNER}, "now PartitionState", old=True)
    inject = {"count": COUNT, "hyperparams": _constant(None, "the injected ones")}
    stateful = {**inject, "hyperparams_states": INNER, "inner_state": INNER}
    yield state("InjectStatefulHyperparamsState", "inject_hyperparams", stateful)
    yield state("InjectHyperparamsState", "inject_hyperparams", {**inject, "inner_state": INNER})
    skip = StateField("scalar", is_optional=True)
    steps = {"mini_step": COUNT, "gradient_step": COUNT, "inner_opt_state": INNER, "acc_grads": SUM, "skip_state": skip}
    yield state("MultiStepsState", "MultiSteps", steps)
    finite = {"notfinite_count": COUNT, "last_finite": FLAG, "total_notfinite": COUNT, "inner_state": INNER}
    yield state("ApplyIfFiniteState", "apply_if_finite", finite)
    yield state("ConditionallyTransformState", "conditional", {"inner_state": INNER, "step": COUNT})
    yield state("ConditionallyMaskState", "conditional", {"step": COUNT, "inner_state": INNER})
    yield state("MaybeUpdateState", "conditional", {"inner_state": INNER, "step": COUNT}, old=True)
    yield state("ZeroNansState", "zero_nans", {"found_nan": StateField("scalar", layout="per leaf")})
    yield state("AddNoiseState", "noise", {"count": COUNT, "rng_key": KEY})
    yield state("SnapshotState", "snapshot", {"measurement": UNKNOWN})
    yield state("MonitorState", "monitor", {"measurements": UNKNOWN, "measure_states": INNER})
    yield state("LookaheadState", "lookahead", {"fast_state": INNER, "steps_since_sync": COUNT})
    yield state("LookaheadParams", "lookahead params", {"fast": COPY, "slow": COPY}, "params, not optimizer state")

    rate, infinite = _constant(1.0), _constant(float("inf"))
    search = {"learning_rate": rate, "value": infinite, "grad": GRADIENT}
    yield state("ScaleByZoomLinesearchState", "line search", {**search, "info": INNER})
    yield state("ScaleByBacktrackingLinesearchState", "line search", {**search, "info": INNER})
    yield state("ScaleByBacktrackingLinesearchState", "line search", search, old=True)
    info = {"num_linesearch_steps": COUNT, "decrease_error": infinite}
    yield state("ZoomLinesearchInfo", "line search info", {**info, "curvature_error": infinite})
    module = "optax._src.linesearch"
    yield state("BacktrackingLinesearchInfo", "line search info", info)
    within = "lives only within one line search"
    trying = {"learning_rate": UNKNOWN, "new_value": UNKNOWN, "new_grad": TREE}
    backtracking = {**trying, "decrease_error": UNKNOWN, "iter_num": COUNT}
    yield state("BacktrackingLineSearchState", "line search", backtracking, within)
    backtracking = {**trying, "accepted": UNKNOWN, "iter_num": COUNT}
    yield state("BacktrackingSearchState", "line search", backtracking, within, old=True)
    trees = dict.fromkeys(("params", "updates", "grad", "safe_grad"), TREE)
    zoom = {name: trees.get(name, UNKNOWN) for name in _ZOOM.split()}
    yield state("ZoomLinesearchState", "line search", {**zoom, "count": COUNT}, within)

    module = "optax.contrib"
    ademamix = {"count": COUNT, "count_m2": COUNT, "m1": MOMENT, "m2": MOMENT, "nu": MOMENT}
    yield state("ScaleByAdemamixState", "AdEMAMix", ademamix)
    yield state("ScaleBySimplifiedAdEMAMixState", "simplified AdEMAMix", {"t": COUNT, "m": MOMENT, "n": MOMENT})
    cocob = {"init_particles": COPY, "cumulative_gradients": SUM, "scale": _filled(1e-8, "eps")}
    yield state("COCOBState", "COCOB", {**cocob, "subgradients": SUM, "reward": SUM})
    averages = {"exp_avg": MOMENT, "exp_avg_sq": MOMENT}
    weighted = {"estim_lr": _constant(1e-6, "estim_lr0"), "numerator_weighted": ZERO, "count": COUNT}
    yield state("DAdaptAdamWState", "D-Adapt AdamW", {**averages, "grad_sum": SUM, **weighted})
    yield state("ProdigyState", "Prodigy", {**averages, "grad_sum": SUM, "params0": COPY, **weighted})
    dog = {"init_params": COPY, "max_dist": UNKNOWN, "sum_sq_norm_grads": ZERO}
    yield state("DoGState", "DoG", {"is_init_step": FLAG, **dog})
    dog = {"init_params": COPY, "estim_dist": UNKNOWN, "sum_sq_norm_grads": ZERO}
    yield state("DoGState", "DoG", {"first_step": FLAG, **dog}, old=True)
    dowg = {"init_params": COPY, "weighted_sq_norm_grads": ZERO}
    yield state("DoWGState", "DoWG", {**dowg, "estim_sq_dist": _constant(1e-4, "init_estim_sq_dist")})
    projector = StateField("accumulator", layout="other")
    yield state("GaLoreState", "GaLore", {"count": COUNT, "base_optimizer_state": INNER, "projector": projector})
    yield state("MadgradState", "MADGRAD", {"count": COUNT, "grad_sum_sq": SUM, "s": SUM, "x0": COPY})
    mechanic = {"base_optimizer_state": INNER, "count": COUNT, **dict.fromkeys("rmv", ZERO)}
    yield state("MechanicState", "Mechanic", {**mechanic, "s": _constant(1e-6, "s_init"), "x0": COPY})
    bound = {"barf": ZERO, "gamma": ZERO, "lb": _constant(0.0, "lower_bound"), "count": COUNT}
    yield state("MomoState", "MoMo", {"exp_avg": MOMENT, **bound})
    yield state("MomoAdamState", "MoMo-Adam", {**averages, **bound})
    yield state("MuonState", "Muon", {"count": COUNT, "mu": MOMENT, "ns_coeffs": _constant(None, "ns_coeffs")})
    yield state("DifferentiallyPrivateAggregateState", "differential privacy", {"rng_key": KEY})
    one, best = _constant(1.0), _constant(float("inf"))
    plateau = {"scale": one, "best_value": best, "plateau_count": COUNT, "cooldown_count": COUNT, "count": COUNT}
    yield state("ReduceLROnPlateauState", "reduce on plateau", {**plateau, "avg_value": ZERO})
    plateau = {"lr": one, "best_loss": best, "plateau_count": COUNT, "cooldown_counter": COUNT}
    yield state("ReduceLROnPlateauState", "reduce on plateau", plateau, old=True)
    cache = StateField("params-like", "params", "params", is_optional=True)
    sam = {"steps_since_sync": COUNT, "opt_state": INNER, "adv_state": INNER, "cache": cache}
    yield state("SAMState", "SAM", sam, "cache is None in opaque mode")
    free = {"b1": _constant(0.9, "b1"), "weight_sum": ZERO, "step_count": _constant(1, role="count"), "max_lr": ZERO}
    z = StateField("params-like", "params", "params")
    yield state("ScheduleFreeState", "schedule-free", {**free, "base_optimizer_state": INNER, "z": z})
    yield state("SophiaState", "Sophia", {**adam, "hessian_fn_state": INNER})
    yield state("HutchinsonState", "Hutchinson", {"key": KEY})
    yield state("SplitRealAndImaginaryState", "complex split", {"inner_state": INNER})
    module = "optax.contrib._complex_valued"
    halves = {"real": TREE, "imaginary": TREE}
    yield state("SplitRealAndImaginaryArrays", "complex split", halves, "takes the place of one complex array")

    module = "optax.experimental._aggregating"
    ready = {"micro_step": COUNT, "ready": ZERO}
    yield state("AccumulateAvgUpdatesState", "gradient accumulation", {**ready, "avg_grad": SUM})
    sums = {**ready, "mean_grads": SUM, "sum_sq_diff_grads": SUM}
    yield state("PerElementMeanAndSumSqDiffGradsState", "gradient statistics", sums)
    emas = {"mean_grads_ema": MOMENT, "variance_grads_ema": MOMENT}
    average = {"count": COUNT, "ema_decay": _constant(None, "ema_decay"), **emas}
    yield state("PerElementMeanAndVarianceEMAState", "gradient statistics", average)


STATES: tuple[StateClass, ...] = tuple(_table())


@cache
def candidates(fields: frozenset[str]) -> tuple[StateClass, ...]:
    """The classes that these field names may be, the default first.

    Those with exactly these fields; if there are none, those that also have fields which may hold nothing on disk.
    """
    exact = tuple(state for state in STATES if state.fields.keys() == fields)
    if exact or len(fields) < 2:
        return exact
    return tuple(s for s in STATES if fields < s.fields.keys() and _may_lack(s, s.fields.keys() - fields))


def _may_lack(state: StateClass, missing: Iterable[str]) -> bool:
    return all(state.fields[name].is_optional for name in missing)
