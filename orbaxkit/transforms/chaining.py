"""chain: transforms one after another."""

from dataclasses import dataclass
from typing import ClassVar

from orbaxkit.errors import NotInvertibleError
from orbaxkit.planning.plan import Plan, Transform
from orbaxkit.transforms.rules import arguments, call_text, reason, rule_to_json


@dataclass(frozen=True, repr=False)
class Chain:
    """See `chain`."""

    transforms: tuple[Transform, ...]
    verb: ClassVar[str] = "chain"
    positional: ClassVar[tuple[str, ...]] = ("transforms",)
    is_variadic: ClassVar[bool] = True
    arguments = arguments
    __repr__ = call_text
    to_json = rule_to_json

    def __call__(self, plan: Plan) -> Plan:
        """Apply each in turn."""
        for transform in self.transforms:
            plan = transform(plan)
        return plan

    def inverse(self) -> "Chain":
        """The inverses in reverse order; every transform that has none is named."""
        done, problems = [], []
        for transform in reversed(self.transforms):
            try:
                done.append(transform.inverse())  # type: ignore[attr-defined]
            except (NotInvertibleError, AttributeError) as error:
                problems.append(
                    (repr(transform), reason(error) if isinstance(error, NotInvertibleError) else "has no inverse()")
                )
        if problems:
            raise NotInvertibleError("these transforms cannot be undone", leaves=problems)
        return chain(*done)


def chain(*transforms: Transform) -> Chain:
    """Apply transforms in order: `chain(a, b)(plan)` is `b(a(plan))`. Chains inside are flattened.

    >>> ok.chain(ok.transpose("w"), ok.rename({"w": "weight"})).inverse()
    chain(rename({'weight': 'w'}), transpose('w'))
    """
    flat: list[Transform] = []
    for transform in transforms:
        flat += transform.transforms if isinstance(transform, Chain) else [transform]
    return Chain(tuple(flat))
