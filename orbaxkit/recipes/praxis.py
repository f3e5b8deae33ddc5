"""Praxis: the checkpoint's names and those of NeMo Automodel's modules, both as safetensors.

Facts from the page of `nemo_automodel.components.models.praxis.state_dict_adapter`. Where the page is silent, assumed:
of the packed shared expert `[hidden, 2 * inter]` the first half is the gate and the second the up projection; the
routed experts keep their layout; a trunk name that the page does not list stays as it is.
"""

from collections.abc import Iterator

from orbaxkit.recipes.rows import Cut, Recipe, Row

_TOWERS = ("backbone/encoder", "backbone/decoder")
# Only some blocks have experts, and only some a dense feed-forward.
_GROUPS = ("dense", "experts", "shared experts", "modulators")


def praxis() -> Recipe:
    """The checkpoint (`mha`, `ffn.0`, packed shared experts) <-> Automodel's modules (`attn`, `gate_proj`, …).

    `action_expert` has the same names on both sides. What a conversion back is to leave out goes with `ok.drop` after.
    """
    return Recipe(
        "praxis",
        "Praxis' checkpoint",
        "Automodel's modules",
        tuple(row for tower in _TOWERS for row in _rows(tower)),
        cuts=tuple(
            Cut(f"{tower}/core/blocks/{{i}}/ffn/shared/gate_up", "gate_up/{j}", "h (two f) -> two h f", (("two", 2),))
            for tower in _TOWERS
        ),
        mixed=frozenset(f"{group} of {tower}" for group in _GROUPS for tower in _TOWERS),
        keeps_others=True,
    )


def _rows(tower: str) -> Iterator[Row]:
    dense, experts, shared, modulators = (f"{group} of {tower}" for group in _GROUPS)
    video = f"{tower}/output_projections/VideoTensor/proj"
    yield Row(f"{tower}/t_proj/VideoTensor/**", f"{tower}/time_proj/**")
    for number, name in ((0, "fc1"), (2, "fc2"), (3, "norm")):
        text = f"{tower}/input_projections/TextEncodingTensor/proj/{number}/**"
        yield Row(text, f"{tower}/text_in/{name}/**")
    yield Row(f"{tower}/input_projections/VideoTensor/proj/**", f"{tower}/video_in/**")
    if tower.endswith("decoder"):
        yield Row(f"{video}/0/**", f"{tower}/video_out/norm/**")
        yield Row(f"{video}/1/**", f"{tower}/video_out/linear/**")
    else:
        yield Row(f"{video}/**", f"{tower}/video_out/**")
    block = f"{tower}/core/blocks/{{i}}"
    for name in "qkv":
        yield Row(f"{block}/mha/in_proj/{name}_weight", f"{block}/attn/{name}_proj/weight")
    yield Row(f"{block}/mha/**", f"{block}/attn/**")
    yield Row(f"{block}/ffn/0/linear/a_weight", f"{block}/ffn/gate_proj/weight", "", dense)
    yield Row(f"{block}/ffn/0/linear/b_weight", f"{block}/ffn/up_proj/weight", "", dense)
    yield Row(f"{block}/ffn/1/weight", f"{block}/ffn/down_proj/weight", "", dense)
    yield Row(f"{block}/ffn/router/weight", f"{block}/ffn/gate/weight", "", experts)
    yield Row(f"{block}/ffn/expert_bias", f"{block}/ffn/gate/e_score_correction_bias", "", experts)
    yield Row(f"{block}/ffn/routed/gate_up_weight", f"{block}/ffn/experts/gate_and_up_projs", "", experts)
    yield Row(f"{block}/ffn/routed/down_weight", f"{block}/ffn/experts/down_projs", "", experts)
    for half, name in enumerate(("gate_proj", "up_proj")):
        row = f"{block}/ffn/shared/gate_up/{half}"
        yield Row(row, f"{block}/ffn/shared_experts/{name}/weight", "h f -> f h", shared)
    yield Row(f"{block}/ffn/shared/down", f"{block}/ffn/shared_experts/down_proj/weight", "f h -> h f", shared)
    for name in ("weight", "bias"):
        yield Row(f"{tower}/core/modulators/{{i}}/{name}", f"{block}/modulator/{name}", "", modulators)
