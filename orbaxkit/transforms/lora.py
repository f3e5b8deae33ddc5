"""merge_lora: low-rank updates into the weights that they belong to."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from orbaxkit.arguments import one_of
from orbaxkit.errors import NotInvertibleError, TransformError
from orbaxkit.paths import Pattern, check_template, compile_pattern, expand, format_path
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.expressions import LORA_FORMS
from orbaxkit.planning.plan import Output, Plan
from orbaxkit.transforms.rules import Problem, arguments, call_text, find, no_match, reason, refuse, rule_to_json

# How LoRA leaves are called by openpi, PEFT, Tunix and the like: `lora_a`, `lora_A`, `gating_einsum_lora_b`.
_LORA_NAME = re.compile(r"(.*_)?lora_[ab]", re.IGNORECASE)


@dataclass(frozen=True, repr=False)
class MergeLora:
    """See `merge_lora`."""

    w: Pattern
    a: Pattern
    b: Pattern
    scale: float = 1.0
    form: str = "product"
    rest: str = "error"
    verb: ClassVar[str] = "merge_lora"
    positional: ClassVar[tuple[str, ...]] = ("w",)
    is_variadic: ClassVar[bool] = False
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Merged weights in place of weights; the LoRA leaves that went in are gone."""
        outputs, used, problems = dict(plan.outputs), set(), []
        for name, output, match in find(plan, self.w, self):
            pair = [format_path(expand(template, match)) for template in (self.a, self.b)]
            lacking = [other for other in pair if other not in plan.outputs]
            if len(lacking) == 1:
                problems.append((lacking[0], f"is missing, {name!r} has only the other half"))
            if lacking:
                continue
            used.update(pair)
            try:
                a, b = (plan.outputs[other].expr for other in pair)
                outputs[name] = Output(output.path, ex.merge_lora(output.expr, a, b, self.scale, self.form))
            except TransformError as error:
                problems.append((name, reason(error)))
        if not used and not problems:
            raise no_match(plan.outputs, [self.a, self.b], self)
        problems += self._unused(plan, used)
        hint = "merge the others first, with a rule of their own that says rest='keep'; or drop them by name"
        refuse(problems, self, "LoRA leaves that cannot be merged, or that this rule does not use", hint)
        return plan.with_outputs({name: output for name, output in outputs.items() if name not in used})

    def _unused(self, plan: Plan, used: set[str]) -> list[Problem]:
        """LoRA leaves that are left: those of this rule's patterns always, others unless a later rule takes them."""
        problems = []
        for name, output in plan.outputs.items():
            is_ours = any(pattern.match(output.path) is not None for pattern in (self.a, self.b))
            is_lora = any(_LORA_NAME.fullmatch(str(segment)) for segment in output.path)
            if name not in used and (is_ours or (is_lora and self.rest == "error")):
                problems.append((name, "is not used"))
        return problems

    def inverse(self) -> "MergeLora":
        """Refused: a sum does not tell its parts."""
        raise NotInvertibleError("merged LoRA weights cannot be taken apart", where=repr(self))


def merge_lora(
    w: "str | re.Pattern[str]",
    *,
    a: str,
    b: str,
    scale: int | float = 1.0,
    form: Literal["product", "summed_heads"] = "product",
    rest: Literal["error", "keep"] = "error",
) -> MergeLora:
    """Merge LoRA pairs into their weights: `W + scale * dW`, computed in float32, rounded to the dtype of W.

    `w` finds weights; `a` and `b`, filled with what it caught, name their pairs: `merge_lora("**/{m}/kernel",
    a="**/{m}/lora_a", b="**/{m}/lora_b", scale=alpha / rank)`. Weights without a pair stay. Leading axes (layers,
    heads) are merged one by one.

    Args:
        form: `product`: `dW = A @ B`. `summed_heads`: openpi's `attn_vec_einsum`, whose LoRA sums over heads twice:
            `dW[n, h, d] = sum_l A[n, h, l] * sum_m B[m, l, d]`; there `W + A @ B` is wrong.
        rest: LoRA leaves that the rule does not use are an error; "keep" leaves those of other rules to them.

    >>> tree = {"w": jnp.eye(2), "a": jnp.array([[1.0], [0.0]]), "b": jnp.array([[0.0, 2.0]])}
    >>> ok.apply(tree, ok.merge_lora("w", a="a", b="b"))["w"].tolist()
    [[1.0, 2.0], [0.0, 1.0]]
    """
    one_of("form", form, LORA_FORMS)
    one_of("rest", rest, ("error", "keep"))
    pattern, left, right = (compile_pattern(text) for text in (w, a, b))
    for template in (left, right):
        check_template(template, pattern)
    return MergeLora(pattern, left, right, float(scale), form, rest)
