"""Optimizer slots follow their params: what a transform does to params, it does to every mirror of them.

A transform is applied to a plan as it stands; what it made of each param is then repeated, expression for expression,
on the moments (sums, copies) of that param. Counts are untouched.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.planning import expressions as ex
from orbaxkit.planning.mirrored import Refusal, mirrored_expression, without_values
from orbaxkit.planning.nodes import Read, reads_of
from orbaxkit.planning.plan import Output, Plan, Transform, compose
from orbaxkit.slots import Slot, find_slots, mirrored_root
from orbaxkit.specs import Specs

Problem = tuple[str, str]
# These touch what they match and nothing else, or see to the slots themselves.
_LITERAL = {"select", "cast", "fill", "recipe"}
_REMEDY = 'drop the optimizer state first (ok.select("params/**")) and begin a fresh one: ok.reset_optimizer(ckpt, tx)'


@dataclass(frozen=True)
class Mirror:
    """One field of a slot whose leaves follow the params: param -> the field's leaf, both by name."""

    slot: Slot
    field: str
    root: KeyPath
    leaves: Mapping[str, str]
    suffix: KeyPath = ()  # below each param's path, where a param has several values

    @property
    def layout(self) -> str:
        """How the field's shapes follow the params'."""
        return self.slot.default.fields[self.field].layout

    @property
    def initial(self) -> str:
        """What the field starts as."""
        return self.slot.default.fields[self.field].initial

    @property
    def role(self) -> str:
        """`moment`, `accumulator`, `params-like`, …"""
        return self.slot.default.fields[self.field].role


def apply_transform(transform: Transform, plan: Plan) -> Plan:
    """Apply a transform to a plan; where the plan holds an optimizer state, its slots follow.

    Raises TransformError: moments that cannot follow, or that a drop would leave without their params.
    """
    if getattr(transform, "verb", None) == "chain":
        for inner in transform.transforms:  # type: ignore[attr-defined]
            plan = apply_transform(inner, plan)
        return plan
    if getattr(transform, "verb", None) in _LITERAL:
        return transform(plan)
    base, mirrors = _mirrors(plan.specs)
    if not mirrors:
        return transform(plan)
    if plan.is_identity:
        return _followed(_changed(plan, transform, mirrors), transform, base, mirrors)
    whole = Plan.identity(plan.specs)
    return compose(plan, _followed(_changed(whole, transform, mirrors), transform, base, mirrors))


def _changed(whole: Plan, transform: Transform, mirrors: list[Mirror]) -> Plan:
    """What the transform makes of these leaves; a merge does not see the moments of what it merges."""
    if getattr(transform, "verb", None) != "merge_lora":
        return transform(whole)
    hidden = {name: whole.outputs[name] for mirror in mirrors for name in mirror.leaves.values()}
    seen = {name: output for name, output in whole.outputs.items() if name not in hidden}
    merged = transform(whole.with_outputs(seen))
    return merged.with_outputs({**merged.outputs, **hidden})


def _mirrors(specs: Specs) -> tuple[KeyPath, list[Mirror]]:
    """Where the params are, and every field that mirrors them; none where the params are not in the tree."""
    slots = find_slots(specs)
    base = mirrored_root(specs, slots)
    return ((), []) if base is None else (base, list(_fields(specs, base, slots)))


def _fields(specs: Specs, base: KeyPath, slots: Iterable[Slot]) -> Iterator[Mirror]:
    for slot in slots:
        for field, names in slot.mirrors.items():
            cut = 1 if slot.default.fields[field].layout == "per axis" else 0
            by_suffix: dict[KeyPath, dict[str, str]] = {}
            for name in names:
                rest = slot.param_of(specs, name)
                param = format_path((*base, *rest[: len(rest) - cut]))
                if param in specs.leaves:
                    by_suffix.setdefault(rest[len(rest) - cut :], {})[param] = name
            for suffix, leaves in by_suffix.items():
                yield Mirror(slot, field, (*slot.key_path, field), leaves, suffix)


def _followed(changed: Plan, transform: Transform, base: KeyPath, mirrors: list[Mirror]) -> Plan:
    """The changed plan in which each mirror had done to it what was done to its params."""
    made = _made_of_params(changed, base)
    mirrored = {param for mirror in mirrors for param in mirror.leaves}
    moved_base = _moved_base(changed.source, base, made, mirrored)
    new: dict[str, list[Output]] = {}  # by the mirror's leaf whose place they take
    gone: set[str] = set()
    problems: list[Problem] = []
    for mirror in mirrors:
        own = {param: name for param, name in mirror.leaves.items() if _is_untouched(changed, name)}
        problems += _orphans(changed, transform, own)
        for output in made:
            _follow(output, mirror, own, base, moved_base, changed.source, new, gone, problems)
    if problems:
        raise TransformError(
            "the optimizer state cannot follow", leaves=dict.fromkeys(problems), where=repr(transform), hint=_REMEDY
        )
    return changed.with_outputs(_in_place(changed, new, gone))


def _made_of_params(changed: Plan, base: KeyPath) -> list[Output]:
    """The outputs that are made of params and are no longer what they were."""
    found = []
    for name, output in changed.outputs.items():
        if isinstance(output.expr, Read) and output.expr.name == name:
            continue
        reads = [read for read in reads_of(output.expr) if read.source is None]
        if reads and all(changed.source.paths[read.name][: len(base)] == base for read in reads):
            found.append(output)
    return found


def _is_untouched(changed: Plan, name: str) -> bool:
    """Whether the transform left a leaf as it was; else its own pattern meant the leaf, and has done its part."""
    output = changed.outputs.get(name)
    return output is not None and isinstance(output.expr, Read) and output.expr.name == name


def _moved_base(specs: Specs, base: KeyPath, made: list[Output], mirrored: set[str]) -> KeyPath:
    """Where the params are now, where all that are mirrored only moved there together; else where they were."""
    heads: dict[str, KeyPath] = {}
    for output in made:
        if isinstance(output.expr, Read):
            rest = specs.paths[output.expr.name][len(base) :]
            if rest and output.path[-len(rest) :] == rest:
                heads[output.expr.name] = output.path[: -len(rest)]
    moved = set(heads.values())
    return moved.pop() if len(moved) == 1 and mirrored <= set(heads) else base


def _orphans(changed: Plan, transform: Transform, own: Mapping[str, str]) -> Iterator[Problem]:
    if getattr(transform, "verb", None) == "drop":
        for param, name in own.items():
            if param not in changed.outputs:
                yield name, f"would be left without its param {param}: drop it too"


def _follow(
    output: Output,
    mirror: Mirror,
    own: Mapping[str, str],
    base: KeyPath,
    moved_base: KeyPath,
    specs: Specs,
    new: dict[str, list[Output]],
    gone: set[str],
    problems: list[Problem],
) -> None:
    """Repeat on a mirror what made one output of its params."""
    params = [read.name for read in reads_of(output.expr)]
    names = [own[param] for param in params if param in own]
    if not names:
        return
    try:
        plain = without_values(output.expr, mirror.role, mirror.initial)
    except Refusal as refusal:
        problems.append((names[0], str(refusal)))
        return
    if len(names) < len(params):
        lacking = next(param for param in params if param not in own)
        problems.append((names[0], f"is to be joined as its params are, and {lacking} has no {mirror.field}"))
        return
    root = moved_base if output.path[: len(moved_base)] == moved_base else base
    if output.path[: len(root)] != root:
        problems.append((names[0], f"cannot follow its param to {format_path(output.path)}, outside the other params"))
        return
    sources = {param: (specs[param].shape, ex.read(own[param], specs[own[param]])) for param in params}
    try:
        expr = mirrored_expression(plain, sources, mirror.layout)
    except (Refusal, TransformError) as error:
        problems.append((names[0], str(error).split("\n")[0]))
        return
    path = (*mirror.root, *output.path[len(root) :], *mirror.suffix)
    new.setdefault(names[0], []).append(Output(path, expr))
    gone.update(names)


def _in_place(changed: Plan, new: Mapping[str, list[Output]], gone: set[str]) -> dict[str, Output]:
    outputs: dict[str, Output] = {}
    for name, output in changed.outputs.items():
        for made in new.get(name, ()):
            outputs[format_path(made.path)] = made
        if name not in gone:
            outputs[name] = output
    return outputs
