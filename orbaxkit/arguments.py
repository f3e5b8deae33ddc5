"""Checks of arguments that would otherwise fail late, or be taken for something else."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbaxkit.errors import OrbaxkitError, TransformError


def one_of(name: str, value: Any, allowed: Sequence[Any], error: type[OrbaxkitError] = TransformError) -> None:
    """Refuse a value that is none of those allowed."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        raise error(f"{name}={value!r}", hint=f"one of {', '.join(map(repr, allowed))}")


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """A mapping, or none."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise TransformError(f"{name}={value!r} is no mapping")


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer, `least` or more; a float that happens to be whole is none."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TransformError(f"{name}={value!r} is not an integer") from None
    if least is not None and number < least:
        raise TransformError(f"{name}={number} is less than {least}")
    return number


def number(name: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise TransformError(f"{name}={value!r} is no finite number")


def wholes(name: str, values: Iterable[Any], least: int | None = None) -> tuple[int, ...]:
    """Several integers."""
    try:
        return tuple([whole(name, value, least) for value in values])
    except TypeError:
        raise TransformError(f"{name}={values!r} is not a sequence of integers") from None
