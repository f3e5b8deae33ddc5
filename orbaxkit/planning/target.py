"""Check what a plan yields against the target that a user wants, on specs alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from orbaxkit.arguments import one_of
from orbaxkit.errors import TargetError
from orbaxkit.paths import format_path
from orbaxkit.specs import LeafSpec, Specs
from orbaxkit.trees import Target, TargetLeaf


@dataclass(frozen=True)
class Leniency:
    """What may differ between a checkpoint and a target; each is an error unless it is named."""

    on_missing: Literal["error", "keep"] = "error"
    on_unexpected: Literal["error", "ignore"] = "error"
    on_shape_mismatch: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        one_of("on_missing", self.on_missing, ("error", "keep"), TargetError)
        one_of("on_unexpected", self.on_unexpected, ("error", "ignore"), TargetError)
        one_of("on_shape_mismatch", self.on_shape_mismatch, ("error", "keep"), TargetError)


@dataclass(frozen=True)
class Fit:
    """Which output fills each target leaf; `kept` are the target leaves that keep their own value."""

    filled: Mapping[str, str]
    kept: tuple[str, ...]


def fit(found: Specs, target: Target, leniency: Leniency, *, strip_value: bool) -> Fit:
    """Match a plan's outputs to a target's leaves.

    A first-level key that the target lacks was not asked for; below the keys it has, everything must match: names,
    shapes and dtypes. A box (nnx Variable, linen Partitioned) matches with and without its `value` level;
    `strip_value` lets any leaf do so. Raises one TargetError that lists every disagreement.
    """
    matched = {name: _partner(leaf, found, strip_value) for name, leaf in target.leaves.items()}
    missing = [name for name, partner in matched.items() if partner is None]
    used = set(matched.values())
    unexpected = [name for name in _asked_for(found, target) if name not in used]
    pairs = {name: partner for name, partner in matched.items() if partner is not None}
    shapes = [name for name, partner in pairs.items() if _shapes_differ(found[partner], target.leaves[name])]
    kinds = [
        (name, partner)
        for name, partner in pairs.items()
        if name not in set(shapes) and not agree(found[partner], target.leaves[name])
    ]

    problems = []
    if leniency.on_missing == "error":
        problems += [(name, f"missing: target wants {target.leaves[name].spec}") for name in missing]
    if leniency.on_unexpected == "error":
        problems += [(name, f"unexpected: the target has no such leaf, found {found[name]}") for name in unexpected]
    if leniency.on_shape_mismatch == "error":
        problems += [
            (name, f"shape: found {found[pairs[name]]}, target wants {target.leaves[name].spec}") for name in shapes
        ]
    problems += [
        (name, f"dtype: found {found[partner]}, target wants {target.leaves[name].spec}") for name, partner in kinds
    ]
    kept = [
        *(missing if leniency.on_missing == "keep" else ()),
        *(shapes if leniency.on_shape_mismatch == "keep" else ()),
    ]
    problems += [
        (name, "abstract in the target: there is no value to keep") for name in kept if target.leaves[name].is_abstract
    ]
    if problems:
        raise _disagreement(problems, found, target, bool(pairs))
    return Fit({name: partner for name, partner in pairs.items() if name not in set(kept)}, tuple(kept))


def _partner(leaf: TargetLeaf, found: Specs, strip_value: bool) -> str | None:
    """The output for a target leaf: the same path, or the same but for the `value` level of a box."""
    options = [leaf.path]
    if leaf.is_boxed:
        options.append(leaf.path[:-1])
    elif strip_value:
        options.append((*leaf.path, "value"))
    for path in options:
        name = format_path(path)
        if name in found.leaves and found.leaves[name].kind != "empty":
            return name
    return None


def _asked_for(found: Specs, target: Target) -> Iterable[str]:
    """Leaves under a first-level key that the target has; a sequence is asked for as a whole."""
    for name, spec in found.items():
        first = found.paths[name][:1]
        is_asked = not first or isinstance(first[0], int) or first[0] in target.top_level
        if is_asked and spec.kind != "empty":
            yield name


def _shapes_differ(found: LeafSpec, leaf: TargetLeaf) -> bool:
    return "string" not in (found.kind, leaf.spec.kind) and found.shape != leaf.spec.shape


def agree(found: LeafSpec, leaf: TargetLeaf) -> bool:
    """Kinds and dtypes agree. Numbers have no dtype of their own: whether one survives is checked once it is read."""
    wanted = leaf.spec
    if found.kind in ("string", "key") or wanted.kind in ("string", "key"):
        return found.dtype_name == wanted.dtype_name
    if found.dtype is None:
        return False
    if found.kind == "scalar":
        return True
    if isinstance(leaf.value, (bool, int, float, complex)):
        return _number_class(found) == _number_class(wanted)
    return found.dtype == wanted.dtype


def _number_class(spec: LeafSpec) -> str:
    kind = spec.dtype.kind if spec.dtype is not None else "?"
    return {"u": "i", "V": "f"}.get(kind, kind)  # ml_dtypes' floats are of numpy kind V


def _disagreement(problems: list[tuple[str, str]], found: Specs, target: Target, any_matched: bool) -> TargetError:
    what = f"the checkpoint and the target disagree on {len(problems)} {'leaf' if len(problems) == 1 else 'leaves'}"
    hint = _hint({problem.split(":")[0] for _, problem in problems})
    if any(format_path((*leaf.path, "value")) in found.leaves for leaf in target.leaves.values()):
        hint = 'strip_value="auto" takes leaves that NNX saved under `value` for those of the target'
    if not any_matched:
        what = f"0 of {len(target.leaves)} target leaves matched"
        moved = _moved_subtree(found, target)
        if moved:
            what += f"; did you mean prefix {moved[0]}?"
            hint = f"this transform moves it there: ok.rename({{'{moved[0]}/**': '{moved[1]}**'}})"
    return TargetError(what, leaves=problems, hint=hint)


def _hint(kinds: set[str]) -> str:
    calls = {
        "missing": 'on_missing="keep" keeps the target\'s own values',
        "unexpected": 'on_unexpected="ignore" leaves them unread',
        "shape": 'on_shape_mismatch="keep" keeps the target\'s own values',
        "dtype": "ok.cast(dtype, pattern) as a transform, or dtype= for all floating-point arrays, names the cast",
        "abstract in the target": "give the target concrete values there",
    }
    return "; ".join(call for kind, call in calls.items() if kind in kinds)


def _moved_subtree(found: Specs, target: Target) -> tuple[str, str] | None:
    """Where a target of which nothing matched lies in the checkpoint: (the subtree there, its prefix in the target)."""
    wanted = [tuple(map(str, leaf.path)) for leaf in target.leaves.values()]
    have = [tuple(map(str, path)) for path in found.paths.values()]
    if not wanted or not wanted[0]:
        return None
    top = wanted[0][:1] if len(wanted[0]) > 1 and all(path[:1] == wanted[0][:1] for path in wanted) else ()
    for skipped in ((), top):
        tail = wanted[0][len(skipped) :]
        for prefix in (path[: -len(tail)] for path in have if path[-len(tail) :] == tail):
            if {(*prefix, *path[len(skipped) :]) for path in wanted} <= set(have):
                there = (*prefix, *top) if not skipped else prefix
                return format_path(there), f"{format_path(top)}/" if top else ""
    return None
