"""Flags for transforms, applied in the order in which they stand on the command line."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

_HELP = {
    "select": ("PATTERN", "keep only leaves whose path matches; several --select in a row add up"),
    "drop": ("PATTERN", "leave out leaves whose path matches; several --drop in a row add up"),
    "rename": ("OLD=NEW", "rename leaves: 'params/**=model/**', 'layers_{i}/**=blocks/{i}/**'"),
    "unstack": ("PATTERN=INTO[@AXIS]", "one subtree per layer: 'params/layers=layers_{i}@0'"),
    "stack": ("PATTERN=INTO[@AXIS]", "its inverse: 'params/layers_{i}=layers@0'"),
    "cast": ("[PATTERN=]DTYPE", "cast floating-point arrays: bfloat16, 'params/**=bfloat16'"),
    "recipe": ("NAME", "a named conversion: openpi, bert:inverse, openpi:lora=merge"),
    "plan": ("FILE", "a plan, or a transform, as JSON: what to_json() wrote"),
}


def add_rules(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(_HELP)) -> None:
    """Add a flag per transform."""
    group = parser.add_argument_group("transforms, in the order given")
    for name in names:
        metavar, purpose = _HELP[name]
        group.add_argument(f"--{name}", dest="rules", action=_InOrder, metavar=metavar, help=purpose)
    parser.set_defaults(rules=[])


class _InOrder(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.rules = [*namespace.rules, (str(option).lstrip("-"), values)]


def transforms_of(rules: Sequence[tuple[str, str]]) -> list[Any]:
    """The transforms that the flags ask for."""
    import orbaxkit as ok

    out: list[Any] = []
    joined: list[tuple[str, list[str]]] = []
    for name, value in rules:
        if joined and joined[-1][0] == name and name in ("select", "drop"):
            joined[-1][1].append(value)
        else:
            joined.append((name, [value]))
    for name, values in joined:
        if name in ("select", "drop"):
            out.append(getattr(ok, name)(*values))
        else:
            out.append(_MAKE[name](values[0]))
    return out


def _rename(value: str) -> Any:
    import orbaxkit as ok

    old, new = _two(value, "rename")
    return ok.rename({old: new})


def _layers(name: str, value: str) -> Any:
    import orbaxkit as ok

    pattern, into = _two(value, name)
    into, at, axis = into.rpartition("@")
    options = {} if not at else {"axis": _integer(axis, name)}
    return getattr(ok, name)(pattern, into=into if at else axis, **options)


def _cast(value: str) -> Any:
    import orbaxkit as ok

    pattern, equals, dtype = value.rpartition("=")
    return ok.cast(dtype, pattern) if equals else ok.cast(dtype)


def _recipe(value: str) -> Any:
    import orbaxkit as ok
    from orbaxkit.errors import OrbaxkitError

    name, *words = value.split(":")
    given = [word for word in words if word != "inverse"]
    odd = [word for word in given if "=" not in word]
    if odd or words.count("inverse") > 1:
        hint = "a name, then options and inverse, each once: openpi:lora=merge, bert:inverse"
        raise OrbaxkitError(f"--recipe {value!r} cannot be read at {(odd or ['inverse'])[0]!r}", hint=hint)
    made = ok.recipe(name, **{key: _option(text) for key, text in (_two(word, "recipe") for word in given)})
    return made.inverse() if "inverse" in words else made


def _option(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plan(path: str) -> Any:
    """A plan goes on from the leaves that it was made for; what it reads must be there as it was."""
    from orbaxkit.errors import OrbaxkitError

    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"not JSON: {error}"
        raise OrbaxkitError(f"the plan {os.path.basename(path)} cannot be read: {reason}", where=path) from None
    if isinstance(data, dict) and "outputs" in data:
        from orbaxkit.planning import Plan

        return _after(Plan.from_json(data))
    from orbaxkit.transforms.reading import from_json

    return from_json(data)


def _after(loaded: Any) -> Any:
    from orbaxkit.errors import TransformError
    from orbaxkit.specs import compare

    def apply(plan: Any) -> Any:
        wanted = loaded.source.subset(loaded.reads)
        found = compare(plan.specs, wanted)
        problems = [(name, "is not here") for name in found.missing]
        problems += [
            (name, f"{here}, the plan was made for {there}") for name, here, there in found.shape + found.dtype
        ]
        if problems:
            raise TransformError("the plan was made for another checkpoint", leaves=problems)
        return plan.then(loaded)

    return apply


def _two(value: str, name: str) -> tuple[str, str]:
    from orbaxkit.errors import OrbaxkitError

    left, equals, right = value.partition("=")
    if not equals or not left or not right:
        raise OrbaxkitError(f"--{name} {value!r} has no two sides", hint=f"--{name} '{_HELP[name][0]}'")
    return left, right


def _integer(text: str, name: str) -> int:
    from orbaxkit.errors import OrbaxkitError

    try:
        return int(text)
    except ValueError:
        raise OrbaxkitError(f"--{name}: the axis {text!r} is no number") from None


_MAKE: dict[str, Any] = {
    "rename": _rename,
    "unstack": lambda value: _layers("unstack", value),
    "stack": lambda value: _layers("stack", value),
    "cast": _cast,
    "recipe": _recipe,
    "plan": _plan,
}
