"""Transforms from JSON data."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from orbaxkit.errors import TransformError
from orbaxkit.planning.plan import Transform
from orbaxkit.transforms.chaining import chain
from orbaxkit.transforms.choosing import drop, select
from orbaxkit.transforms.copies import unreplicate
from orbaxkit.transforms.filling import fill
from orbaxkit.transforms.joining import concat, split
from orbaxkit.transforms.layers import stack, unstack
from orbaxkit.transforms.layout import reshape, transpose
from orbaxkit.transforms.lora import merge_lora
from orbaxkit.transforms.naming import rename
from orbaxkit.transforms.values import affine, cast

VERBS: Mapping[str, Callable[..., Any]] = {
    verb.__name__: verb
    for verb in (
        affine,
        cast,
        chain,
        concat,
        drop,
        fill,
        merge_lora,
        rename,
        reshape,
        select,
        split,
        stack,
        transpose,
        unreplicate,
        unstack,
    )
}


def from_json(data: Any) -> Transform:
    """The transform that its `to_json()` wrote: data only names our own verbs and their arguments.

    Raises TransformError: the data is no transform.

    >>> ok.from_json({"transform": "select", "args": ["params/**"], "options": {}})
    select('params/**')
    """
    verb = data.get("transform") if isinstance(data, Mapping) else None
    if not isinstance(verb, str) or verb not in VERBS:
        raise TransformError(f"{verb!r} is not a transform", hint=f"one of {', '.join(VERBS)}")
    args, options = data.get("args", []), data.get("options", {})
    try:
        return VERBS[verb](*map(_value, args), **{name: _value(value) for name, value in options.items()})
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise TransformError(f"the arguments of {verb} cannot be read: {error}") from error


def _value(value: Any) -> Any:
    match value:
        case {"transform": _}:
            return from_json(value)
        case {"regex": text, "flags": flags}:
            return re.compile(text, flags)
        case {"float": text}:
            return float(text)
        case {"mapping": pairs}:
            return {_value(key): _value(entry) for key, entry in pairs}
        case list():
            return [_value(entry) for entry in value]
    return value
