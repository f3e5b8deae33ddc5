"""Perceiver IO: DeepMind's Haiku params and the tensors of transformers' PerceiverModel.

Facts from deepmind-research's `perceiver/` and from `rename_keys` of transformers 4.30's conversion script. That script
transposes convolution kernels by (3, 2, 1, 0), which swaps height and width; torch wants (3, 2, 0, 1).
"""

import re
from collections.abc import Iterator

from orbaxkit.arguments import one_of
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.planning.plan import Plan, Transform
from orbaxkit.recipes.rows import Recipe, Row
from orbaxkit.slots import is_optimizer_name
from orbaxkit.transforms import rename

_ENCODER = "perceiver/encoder"
_DENSE = "i o -> o i"
_BLOCKS = "perceiver_encoder/~/self_attention"
_CONV = {"torch": "h w i o -> o i h w", "transformers 4.30": "h w i o -> o i w h"}


def perceiver(*, conv: str = "torch") -> Recipe:
    """Haiku's params (language, or ImageNet with learned or convolutional preprocessing) <-> transformers' tensors.

    `conv="transformers 4.30"` lays convolution kernels out as that release's script did, height and width swapped.
    """
    one_of("conv", conv, tuple(_CONV))
    return Recipe(
        "perceiver",
        "Perceiver's Haiku params",
        "transformers' Perceiver tensors",
        (*_encoder(), *_language(), *_image(), *_learned(), *_convolutional(_CONV[conv])),
        arrive=_without_modules,
        leave=_with_modules,
        beside=("state",),
        hints={"_ema": "is BatchNorm's own bookkeeping, for which torch has no place: leave it out with ok.drop"},
    )


def _linear(origin: str, goal: str, group: str) -> Iterator[Row]:
    yield Row(f"{origin}/w", f"{goal}/weight", _DENSE, group)
    yield Row(f"{origin}/b", f"{goal}/bias", "", group)


def _norm(origin: str, goal: str, group: str) -> Iterator[Row]:
    yield Row(f"{origin}/scale", f"{goal}/weight", "", group)
    yield Row(f"{origin}/offset", f"{goal}/bias", "", group)


def _attention(origin: str, goal: str, is_cross: bool, group: str = "") -> Iterator[Row]:
    """A block: cross-attention has a norm for what is attended to besides its own; the last one is the MLP's."""
    inner = f"{goal}/attention/self"
    yield from _norm(f"{origin}/layer_norm", f"{inner}/layernorm1", group)
    if is_cross:
        yield from _norm(f"{origin}/layer_norm_1", f"{inner}/layernorm2", group)
    yield from _norm(f"{origin}/layer_norm_{2 if is_cross else 1}", f"{goal}/layernorm", group)
    for number, name in (("", "query"), ("_1", "key"), ("_2", "value")):
        yield from _linear(f"{origin}/attention/linear{number}", f"{inner}/{name}", group)
    yield from _linear(f"{origin}/attention/linear_3", f"{goal}/attention/output/dense", group)
    yield from _linear(f"{origin}/mlp/linear", f"{goal}/mlp/dense1", group)
    yield from _linear(f"{origin}/mlp/linear_1", f"{goal}/mlp/dense2", group)


def _encoder() -> Iterator[Row]:
    yield Row("perceiver_encoder/~/trainable_position_encoding/pos_embs", "perceiver/embeddings/latents")
    yield from _attention("perceiver_encoder/~/cross_attention", f"{_ENCODER}/cross_attention", is_cross=True)
    yield from _attention(f"{_BLOCKS}/{{i}}", f"{_ENCODER}/self_attends/{{i}}", is_cross=False)


def _language() -> Iterator[Row]:
    group, embeddings = "language", "perceiver/input_preprocessor"
    positions = "perceiver/decoder/output_position_encodings/position_embeddings"
    yield Row("embed/embeddings", f"{embeddings}/embeddings/weight", "", group)
    yield Row("trainable_position_encoding/pos_embs", f"{embeddings}/position_embeddings/weight", "", group)
    yield Row("basic_decoder/~/trainable_position_encoding/pos_embs", positions, "", group)
    decoder = "perceiver/decoder/decoding_cross_attention"
    yield from _attention("basic_decoder/cross_attention", decoder, True, group)
    yield Row("embedding_decoder/bias", "embedding_decoder/bias", "", group)


def _image() -> Iterator[Row]:
    group, decoder = "image", "perceiver/decoder/decoder"
    origin = "classification_decoder/~/basic_decoder"
    positions = f"{decoder}/output_position_encodings/position_embeddings"
    yield Row(f"{origin}/~/trainable_position_encoding/pos_embs", positions, "", group)
    yield from _attention(f"{origin}/cross_attention", f"{decoder}/decoding_cross_attention", True, group)
    yield from _linear(f"{origin}/output", f"{decoder}/final_layer", group)


def _learned() -> Iterator[Row]:
    group, origin, goal = "learned positions", "image_preprocessor", "perceiver/input_preprocessor"
    inputs = f"{origin}/~_build_network_inputs"
    yield Row(f"{origin}/~/conv2_d/w", f"{goal}/convnet_1x1/weight", _CONV["torch"], group)
    yield Row(f"{origin}/~/conv2_d/b", f"{goal}/convnet_1x1/bias", "", group)
    yield from _linear(f"{inputs}/position_encoding_projector/linear", f"{goal}/positions_projection", group)
    positions = f"{goal}/position_embeddings/position_embeddings"
    yield Row(f"{inputs}/trainable_position_encoding/pos_embs", positions, "", group)


def _convolutional(layout: str) -> Iterator[Row]:
    group, goal = "convolution", "perceiver/input_preprocessor/convnet"
    origin = "image_preprocessor/~/conv2_d_downsample/~"
    yield Row(f"{origin}/conv/w", f"{goal}/conv/weight", layout, group)
    for name, torch in (("scale", "weight"), ("offset", "bias")):
        yield Row(f"{origin}/batchnorm/{name}", f"{goal}/batchnorm/{torch}", "1 1 1 c -> c", group)
    for name, torch in (("mean", "running_mean"), ("var", "running_var")):
        state = f"{origin}/batchnorm/~/{name}_ema/average"
        yield Row(state, f"{goal}/batchnorm/{torch}", "1 1 1 c -> c", "running statistics")


def _without_modules(plan: Plan, root: KeyPath) -> Iterator[Transform]:
    """Haiku's modules are paths in one key, and number all but the first of their kind: as plain paths, numbered."""
    depth = len(root)
    moved = {
        name: format_path((*root, *_NUMBERED.sub(_numbered, "/".join(map(str, output.path[depth:]))).split("/")))
        for name, output in plan.outputs.items()
        if not any(map(is_optimizer_name, output.path)) and len(output.path) == depth + 2
    }
    yield rename(lambda name: moved.get(name, name))


def _with_modules(plan: Plan, root: KeyPath) -> Iterator[Transform]:
    depth = len(root)
    moved = {}
    for name, output in plan.outputs.items():
        if output.path[:depth] == root and len(output.path) > depth + 1:
            module = _PLAIN.sub(_plain, "/".join(map(str, output.path[depth:-1])) + "/").rstrip("/")
            moved[name] = format_path((*root, module, output.path[-1]))
    yield rename(lambda name: moved.get(name, name))


_NUMBERED = re.compile(rf"^{_BLOCKS}(?:_(\d+))?/")
_PLAIN = re.compile(rf"^{_BLOCKS}/(\d+)/")


def _numbered(found: re.Match[str]) -> str:
    return f"{_BLOCKS}/{found[1] or 0}/"


def _plain(found: re.Match[str]) -> str:
    return f"{_BLOCKS}/" if found[1] == "0" else f"{_BLOCKS}_{found[1]}/"
