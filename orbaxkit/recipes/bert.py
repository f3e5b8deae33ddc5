"""BERT: google-research/bert's TensorFlow variables, the nested names of Flax, and those of Hugging Face's torch model.

Facts from `modeling.py` and `optimization.py` of google-research/bert, and from transformers' BERT: TensorFlow and Flax
keep dense kernels `[in, out]`, torch `[out, in]`; `cls/seq_relationship/output_weights` is `[2, hidden]` in both of the
outer two; torch and Flax tie the decoder to the word embeddings and write it once.
"""

from collections.abc import Iterator, Mapping

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, format_path, parse_path
from orbaxkit.planning.plan import Plan, Transform
from orbaxkit.recipes.rows import Recipe, Row
from orbaxkit.slots import Slot, find_slots, is_optimizer_name
from orbaxkit.transforms import cast, rename

_LAYER = "bert/encoder/layer_{i}"
_NUMBERED = "bert/encoder/layer/{i}"
_TIED = "has no place in TensorFlow's BERT, which ties it to {}: leave it out with ok.drop, if its values are the same"
_HINTS = {
    "cls/predictions/decoder/weight": _TIED.format("the word embeddings"),
    "cls/predictions/decoder/bias": _TIED.format("cls/predictions/bias"),
    "position_ids": "is a buffer, not a parameter: leave it out with ok.drop",
    "adam_": "is a slot of a variable that is not here",
}
# AdamWeightDecayOptimizer's slots, and where optax has them.
_SLOTS = {"adam_m": "mu", "adam_v": "nu"}
_STATE = "opt_state/0"


def bert() -> Recipe:
    """TensorFlow's variables <-> `params` with Flax's names, and Adam's slots <-> an optax state.

    `adam_m` becomes `mu`, `adam_v` becomes `nu`, and `global_step` the state's `count`. BERT's Adam corrects no bias;
    optax's corrects by `1 - b ** count`, which is 1 after some ten thousand steps.
    """
    return Recipe(
        "bert",
        "BERT's TensorFlow variables",
        "BERT's Flax params",
        tuple(_rows("kernel", "scale", "embedding", "", "o i -> i o")),
        goal_root="params",
        arrive=_slots_of_tensorflow,
        leave=_slots_for_tensorflow,
        hints=_HINTS,
    )


def bert_hf() -> Recipe:
    """TensorFlow's variables <-> the tensors of transformers' `BertForPreTraining`."""
    return Recipe(
        "bert_hf",
        "BERT's TensorFlow variables",
        "BERT's torch tensors",
        tuple(_rows("weight", "weight", "weight", "i o -> o i", "")),
        arrive=_slots_of_tensorflow,
        leave=_slots_for_tensorflow,
        hints=_HINTS,
    )


def _rows(kernel: str, scale: str, embedding: str, dense: str, next_sentence: str) -> Iterator[Row]:
    """The rows of both recipes, which differ in what the last name is and how dense kernels lie."""

    def norm(origin: str, goal: str, group: str = "") -> Iterator[Row]:
        yield Row(f"{origin}/gamma", f"{goal}/{scale}", "", group)
        yield Row(f"{origin}/beta", f"{goal}/bias", "", group)

    def affine(origin: str, goal: str, group: str = "") -> Iterator[Row]:
        yield Row(f"{origin}/kernel", f"{goal}/{kernel}", dense, group)
        yield Row(f"{origin}/bias", f"{goal}/bias", "", group)

    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        yield Row(f"bert/embeddings/{name}", f"bert/embeddings/{name}/{embedding}")
    yield from norm("bert/embeddings/LayerNorm", "bert/embeddings/LayerNorm")
    for part in ("attention/self/query", "attention/self/key", "attention/self/value"):
        yield from affine(f"{_LAYER}/{part}", f"{_NUMBERED}/{part}")
    for part in ("attention/output/dense", "intermediate/dense", "output/dense"):
        yield from affine(f"{_LAYER}/{part}", f"{_NUMBERED}/{part}")
    for part in ("attention/output/LayerNorm", "output/LayerNorm"):
        yield from norm(f"{_LAYER}/{part}", f"{_NUMBERED}/{part}")
    yield from affine("bert/pooler/dense", "bert/pooler/dense", "pooler")
    masked, following = "masked language model", "next sentence"
    yield from affine("cls/predictions/transform/dense", "cls/predictions/transform/dense", masked)
    yield from norm("cls/predictions/transform/LayerNorm", "cls/predictions/transform/LayerNorm", masked)
    yield Row("cls/predictions/output_bias", "cls/predictions/bias", "", masked)
    yield Row("cls/seq_relationship/output_weights", f"cls/seq_relationship/{kernel}", next_sentence, following)
    yield Row("cls/seq_relationship/output_bias", "cls/seq_relationship/bias", "", following)


def _slots_of_tensorflow(plan: Plan, root: KeyPath) -> Iterator[Transform]:
    """Slots lie beside their variables: to one optax state, in which they are where their params are."""
    moved = {name: path for name, o in plan.outputs.items() if (path := _slot_path(o.path, len(root))) is not None}
    if moved:
        _refuse_half(plan, moved, root)
        yield _renamed(moved)
    if "global_step" in plan.outputs:
        step = f"{_STATE}/count" if moved else "step"
        yield rename({"global_step": step})
        yield cast("int32", step)  # optax counts in int32; a step that does not fit is an error when it is read


def _refuse_half(plan: Plan, moved: Mapping[str, KeyPath], root: KeyPath) -> None:
    """Slots of which the other half is missing, that have no step, or another shape than their variable."""
    depth = len(parse_path(_STATE)) + 1
    fields = {path[depth - 1] for path in moved.values()}
    problems = [] if "global_step" in plan.outputs else [("global_step", "is missing beside the slots")]
    for name, path in moved.items():
        variable = plan.outputs.get(format_path((*root, *path[depth:])))
        twins = [(*path[: depth - 1], field, *path[depth:]) in set(moved.values()) for field in _SLOTS.values()]
        if not all(twins) or len(fields) < len(_SLOTS):
            problems.append((name, "is alone: there is no adam_m or no adam_v beside it"))
        elif variable is not None and variable.expr.shape != plan.outputs[name].expr.shape:
            problems.append((name, "has another shape than its variable: change the shapes after the recipe"))
    if problems:
        hint = "leave all slots out: ok.drop('**/*adam_m', '**/*adam_v')"
        raise TransformError("Adam's slots are not whole", leaves=problems, hint=hint)


def _slot_path(path: KeyPath, depth: int) -> KeyPath | None:
    """Where the slot of a variable goes: `bert/pooler/dense/"kernel/adam_m"` to the same place in `mu`."""
    variable, _, slot = str(path[-1]).rpartition("/")
    return (*parse_path(_STATE), _SLOTS[slot], *path[depth:-1], variable) if slot in _SLOTS and variable else None


def _slots_for_tensorflow(plan: Plan, root: KeyPath) -> Iterator[Transform]:
    states = [slot for slot in find_slots(plan.specs) if {"count", "mu", "nu"} <= set(slot.leaves)]
    own = {name for state in states[:1] for names in state.leaves.values() for name in names}
    others = [
        (name, "has no place among Adam's slots")
        for name, output in plan.outputs.items()
        if name not in own and any(map(is_optimizer_name, output.path)) and output.expr.kind != "empty"
    ]
    if len(states) == 1 and states[0].path != _STATE:
        others.append((states[0].path, f"comes back as {_STATE}: rename it to that first"))
    if others:
        hint = "drop what a bundle cannot hold: schedules' counts, averages, other optimizers' states"
        raise TransformError("this optimizer state is more than TensorFlow's BERT has", leaves=others, hint=hint)
    count = f"{states[0].path}/count" if states else "step"
    if states:
        yield _renamed(dict(_beside(plan, states[0], root)))
    if count in plan.outputs:
        yield rename({count: "global_step"})
        yield cast("int64", "global_step")


def _beside(plan: Plan, state: Slot, root: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    for slot, field in _SLOTS.items():
        for name in state.leaves[field]:
            rest = plan.outputs[name].path[len(state.key_path) + 1 :]
            yield name, (*root, *rest[:-1], f"{rest[-1]}/{slot}")


def _renamed(moved: Mapping[str, KeyPath]) -> Transform:
    texts = {name: format_path(path) for name, path in moved.items()}
    return rename(lambda name: texts.get(name, name))
