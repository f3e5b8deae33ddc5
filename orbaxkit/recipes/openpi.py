"""openpi (pi0, pi0.5): the JAX train state's params and the tensors of openpi's PyTorch port.

Facts from openpi's `examples/convert_jax_model_to_pytorch.py`: scanned SigLIP blocks and Gemma layers become one tensor
per layer, einsum weights become `[out, in]` projections, one key/value head.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from orbaxkit.arguments import number, one_of, whole
from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, format_path, parse_path
from orbaxkit.planning.plan import Plan, Transform
from orbaxkit.recipes.rows import Cut, Recipe, Row
from orbaxkit.transforms import merge_lora, rename

_PALIGEMMA = "paligemma_with_expert/paligemma/model"
_VISION = f"{_PALIGEMMA}/vision_tower/vision_model"
_LANGUAGE = f"{_PALIGEMMA}/language_model"
_EXPERT = "paligemma_with_expert/gemma_expert/model"
_BLOCK = "PaliGemma/img/Transformer/encoderblock"
_LAYER = "PaliGemma/llm/layers"

_DENSE = "i o -> o i"
# Heads of SigLIP by the width of its blocks, which is all that PyTorch's tensors tell: So400m.
_VISION_HEADS = {1152: 16}


def openpi(*, vision_heads: int | None = None, lora: str | None = None, lora_scale: float = 1.0) -> Recipe:
    """openpi's params <-> the tensors of its PyTorch port, which has no LoRA.

    `vision_heads` is needed on the way back only, where the vision tower is not So400m. `lora` says what becomes of
    LoRA pairs: "merge" them (those of attention scaled by `lora_scale`, alpha / rank: 1 in openpi's own variants; those
    of the MLPs never are), or "keep" them, layer by layer, beside their weights.
    """
    one_of("lora", lora, (None, "merge", "keep"))
    scale = number("lora_scale", lora_scale)
    heads = None if vision_heads is None else whole("vision_heads", vision_heads, least=1)
    rows = (*_vision(), *_language(), *_expert(), *_heads(), *(_lora() if lora == "keep" else ()))

    def sizes(plan: Plan, root: KeyPath) -> Mapping[str, int]:
        return _sizes(plan, root, heads)

    def arrive(plan: Plan, root: KeyPath) -> Iterator[Transform]:
        yield from _without_value(plan, root)
        if lora == "merge":
            yield from _merged(plan, root, scale)

    return Recipe(
        "openpi",
        "openpi's JAX params",
        "openpi's PyTorch tensors",
        rows,
        origin_root="params",
        cuts=(
            Cut(_BLOCK, "encoderblock/{i}"),
            Cut(_LAYER, "layers/{i}"),
            *(Cut(f"{_LAYER}/{{i}}/attn/{name}/w", "w/{j}") for name in ("kv_einsum", "kv_einsum_1")),
            *(Cut(f"{_LAYER}/{{i}}/{name}/gating_einsum", "gating_einsum/{j}") for name in ("mlp", "mlp_1")),
        ),
        arrive=arrive,
        sizes=sizes,
        hints={"lora_": 'is a LoRA leaf: recipe("openpi", lora="merge") or lora="keep"'},
    )


def _norm(origin: str, goal: str) -> Iterator[Row]:
    yield Row(f"{origin}/scale", f"{goal}/weight")
    yield Row(f"{origin}/bias", f"{goal}/bias")


def _dense(origin: str, goal: str, group: str = "") -> Iterator[Row]:
    yield Row(f"{origin}/kernel", f"{goal}/weight", _DENSE, group)
    yield Row(f"{origin}/bias", f"{goal}/bias", "", group)


def _vision() -> Iterator[Row]:
    yield Row("PaliGemma/img/embedding/kernel", f"{_VISION}/embeddings/patch_embedding/weight", "h w i o -> o i h w")
    yield Row("PaliGemma/img/embedding/bias", f"{_VISION}/embeddings/patch_embedding/bias")
    yield Row("PaliGemma/img/pos_embedding", f"{_VISION}/embeddings/position_embedding/weight", "1 p d -> p d")
    yield from _norm("PaliGemma/img/Transformer/encoder_norm", f"{_VISION}/post_layernorm")
    yield from _dense("PaliGemma/img/head", f"{_PALIGEMMA}/multi_modal_projector/linear")
    block, layer = f"{_BLOCK}/{{i}}", f"{_VISION}/encoder/layers/{{i}}"
    yield from _norm(f"{block}/LayerNorm_0", f"{layer}/layer_norm1")
    yield from _norm(f"{block}/LayerNorm_1", f"{layer}/layer_norm2")
    yield from _dense(f"{block}/MlpBlock_0/Dense_0", f"{layer}/mlp/fc1")
    yield from _dense(f"{block}/MlpBlock_0/Dense_1", f"{layer}/mlp/fc2")
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
        yield Row(f"{attention}/{name}/kernel", f"{layer}/self_attn/{short}_proj/weight", "i vn vh -> (vn vh) i")
        yield Row(f"{attention}/{name}/bias", f"{layer}/self_attn/{short}_proj/bias", "vn vh -> (vn vh)")
    yield Row(f"{attention}/out/kernel", f"{layer}/self_attn/out_proj/weight", "vn vh o -> o (vn vh)")
    yield Row(f"{attention}/out/bias", f"{layer}/self_attn/out_proj/bias")


def _gemma(suffix: str, layer: str) -> Iterator[Row]:
    origin = f"{_LAYER}/{{i}}"
    attention, mlp = f"{layer}/self_attn", f"{layer}/mlp"
    yield Row(f"{origin}/attn/q_einsum{suffix}/w", f"{attention}/q_proj/weight", "n d h -> (n h) d")
    yield Row(f"{origin}/attn/kv_einsum{suffix}/w/0", f"{attention}/k_proj/weight", "1 d h -> h d")
    yield Row(f"{origin}/attn/kv_einsum{suffix}/w/1", f"{attention}/v_proj/weight", "1 d h -> h d")
    yield Row(f"{origin}/attn/attn_vec_einsum{suffix}/w", f"{attention}/o_proj/weight", "n h d -> d (n h)")
    yield Row(f"{origin}/mlp{suffix}/gating_einsum/0", f"{mlp}/gate_proj/weight", _DENSE)
    yield Row(f"{origin}/mlp{suffix}/gating_einsum/1", f"{mlp}/up_proj/weight", _DENSE)
    yield Row(f"{origin}/mlp{suffix}/linear", f"{mlp}/down_proj/weight", _DENSE)


def _language() -> Iterator[Row]:
    layer = f"{_LANGUAGE}/layers/{{i}}"
    yield Row("PaliGemma/llm/embedder/input_embedding", f"{_LANGUAGE}/embed_tokens/weight")
    yield Row("PaliGemma/llm/final_norm/scale", f"{_LANGUAGE}/norm/weight")
    yield from _gemma("", layer)
    yield Row(f"{_LAYER}/{{i}}/pre_attention_norm/scale", f"{layer}/input_layernorm/weight")
    yield Row(f"{_LAYER}/{{i}}/pre_ffw_norm/scale", f"{layer}/post_attention_layernorm/weight")


def _expert() -> Iterator[Row]:
    """The action expert: plain norms in pi0, adaptive ones in pi0.5."""
    layer = f"{_EXPERT}/layers/{{i}}"
    yield from _gemma("_1", layer)
    norms = {
        f"{_LAYER}/{{i}}/pre_attention_norm_1": f"{layer}/input_layernorm",
        f"{_LAYER}/{{i}}/pre_ffw_norm_1": f"{layer}/post_attention_layernorm",
        "PaliGemma/llm/final_norm_1": f"{_EXPERT}/norm",
    }
    for origin, goal in norms.items():
        yield Row(f"{origin}/scale", f"{goal}/weight", "", "pi0")
        yield from _dense(f"{origin}/Dense_0", f"{goal}/dense", "pi0.5")


def _heads() -> Iterator[Row]:
    for name in ("action_in_proj", "action_out_proj"):
        yield from _dense(name, name)
    for name, group in {
        "state_proj": "pi0",
        "action_time_mlp_in": "pi0",
        "action_time_mlp_out": "pi0",
        "time_mlp_in": "pi0.5",
        "time_mlp_out": "pi0.5",
    }.items():
        yield from _dense(name, name, group)


def _without_value(plan: Plan, root: KeyPath) -> Iterable[Transform]:
    """An nnx state ends each path with `value`; released checkpoints do not."""
    inside = [output.path for output in plan.outputs.values() if output.path[: len(root)] == root]
    if any(path[-1] == "value" for path in inside):
        yield rename({f"{format_path(root)}/**/value".lstrip("/"): f"{format_path(root)}/**".lstrip("/")})


# Where the LoRA pairs of a layer are: the weight, what its pair's names begin with, and how the pair multiplies.
# openpi's `attn_vec_einsum` sums its pair over the heads twice, so that a plain product would be wrong there.
_PAIRS: tuple[tuple[str, str, str, Literal["product", "summed_heads"]], ...] = (
    ("attn/q_einsum{s}/w", "attn/q_einsum{s}/", "q_proj", "product"),
    ("attn/kv_einsum{s}/w", "attn/kv_einsum{s}/", "kv_proj", "product"),
    ("attn/attn_vec_einsum{s}/w", "attn/attn_vec_einsum{s}/", "o_proj", "summed_heads"),
    ("mlp{s}/gating_einsum", "mlp{s}/gating_einsum_", "gate_up_proj", "product"),
    ("mlp{s}/linear", "mlp{s}/linear_", "down_proj", "product"),
)
_SUFFIXES = {"": f"{_LANGUAGE}/layers/{{i}}", "_1": f"{_EXPERT}/layers/{{i}}"}


def _merged(plan: Plan, root: KeyPath, scale: float) -> Iterator[Transform]:
    at = f"{format_path((*root,))}/{_LAYER}".lstrip("/")
    for suffix in _SUFFIXES:
        for weight, pair, _, form in _PAIRS:
            w, start = (f"{at}/{text.format(s=suffix)}" for text in (weight, pair))
            if any(name.startswith(f"{start}lora_") for name in plan.outputs):
                own = scale if pair.startswith("attn") else 1.0
                yield merge_lora(w, a=f"{start}lora_a", b=f"{start}lora_b", scale=own, form=form, rest="keep")


def _lora() -> Iterator[Row]:
    """Pairs that are kept: as they are in each layer."""
    for suffix, layer in _SUFFIXES.items():
        for _, pair, goal, _ in _PAIRS:
            part = "self_attn" if pair.startswith("attn") else "mlp"
            for half in ("lora_a", "lora_b"):
                origin = f"{_LAYER}/{{i}}/{pair.format(s=suffix)}{half}"
                yield Row(origin, f"{layer}/{part}/{goal}/{half}", "", f"lora of {part}{suffix}")


def _sizes(plan: Plan, root: KeyPath, vision_heads: int | None) -> Mapping[str, int]:
    """How many heads the merged axes of the PyTorch tensors hold; nothing where a plan has none of them."""
    sizes = {}
    query, key, patches = (
        plan.outputs.get(format_path((*root, *parse_path(name))))
        for name in (
            f"{_LANGUAGE}/layers/0/self_attn/q_proj/weight",
            f"{_LANGUAGE}/layers/0/self_attn/k_proj/weight",
            f"{_VISION}/embeddings/patch_embedding/weight",
        )
    )
    if query is not None and key is not None and key.expr.shape[:1] > (0,):
        sizes["n"] = query.expr.shape[0] // key.expr.shape[0]  # one key/value head
    if patches is not None:
        width = patches.expr.shape[0]
        if vision_heads is None and width not in _VISION_HEADS:
            hint = 'say it: recipe("openpi", vision_heads=…)'
            raise TransformError(f"the tensors do not tell how many heads a vision tower {width} wide has", hint=hint)
        sizes["vn"] = vision_heads or _VISION_HEADS[width]
    return sizes
