"""Which casts are allowed, which are exact, and which must look at the values."""

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from orbaxkit.errors import TransformError
from orbaxkit.specs import DTYPES

# jax halves these where its 64-bit types are switched off.
WIDE = ("int64", "uint64", "float64", "complex128")


def dtype_of(name: Any) -> np.dtype:
    """A dtype by name (`bfloat16`, `float8_e4m3fn`, …) or as given by numpy, ml_dtypes or jax."""
    if isinstance(name, str):
        if name not in DTYPES:
            raise TransformError(f"there is no dtype {name!r}", hint=f"one of {', '.join(DTYPES)}")
        return DTYPES[name]
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise TransformError(f"{name!r} is not a dtype") from error
    if dtype.name not in DTYPES:
        raise TransformError(f"leaves cannot have the dtype {dtype.name}")
    return DTYPES[dtype.name]


@lru_cache(maxsize=256)
def category(dtype: np.dtype) -> str:
    """`bool`, `int`, `float` or `complex`."""
    if dtype.kind in "bc":
        return "bool" if dtype.kind == "b" else "complex"
    return "int" if dtype.name.lstrip("u").startswith("int") else "float"


def check_cast(element: Any, dtype: np.dtype) -> None:
    """Refuse what has no meaning: strings, empty nodes, keys, and dropping an imaginary part."""
    if not element.is_numeric:
        what = {"string": "a string", "empty": "an empty node", "key": "a PRNG key"}[element.kind]
        raise TransformError(f"{what} cannot be cast to {dtype.name}")
    if element.dtype is not None and category(element.dtype) == "complex" and category(dtype) != "complex":
        raise TransformError(f"{element.dtype.name} cannot be cast to {dtype.name}: the imaginary part would be lost")


def is_checked_cast(found: np.dtype | None, to: np.dtype) -> bool:
    """Whether a value may not fit, so that values must be looked at: into integers that do not hold every value."""
    if found is None:
        return True
    return category(to) in ("int", "bool") and not is_exact_cast(found, to)


def same_dtype(a: np.dtype | None, b: np.dtype | None) -> bool:
    """Whether two dtypes are one; numpy itself takes None for float64."""
    return a is b or (a is not None and b is not None and a == b)


@lru_cache(maxsize=4096)
def is_exact_cast(found: np.dtype | None, to: np.dtype) -> bool:
    """Whether every value survives the cast, so that casting back gives the same."""
    if found is None or found == to:
        return found is not None
    kinds = category(found), category(to)
    if (kinds[1] == "complex") != (kinds[0] == "complex") or to.name == "float8_e8m0fnu":
        return False  # complex back to real is refused; e8m0 has no zero
    if kinds[0] == "bool":
        return True
    if kinds == ("int", "int"):
        (low, high), (to_low, to_high) = int_range(found), int_range(to)
        return to_low <= low and high <= to_high
    if kinds[1] == "complex":
        return is_exact_cast(_part(found), _part(to))
    if kinds == ("int", "float"):
        return max(abs(bound) for bound in int_range(found)) <= 2 ** (_finfo(to).nmant + 1) <= _largest(to)
    return kinds == ("float", "float") and _holds(_finfo(to), _finfo(found))


def int_range(dtype: np.dtype) -> tuple[int, int]:
    """The smallest and largest value of an integer or boolean dtype."""
    if dtype.kind == "b":
        return 0, 1
    info: Any = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)


def _finfo(dtype: np.dtype) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _part(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32 if dtype.name == "complex64" else np.float64)


def _largest(dtype: np.dtype) -> float:
    return float(_finfo(dtype).max)


def _holds(wide: Any, narrow: Any) -> bool:
    """More mantissa, a wider range on both ends, and infinities or NaN where the narrow type has them."""
    if wide.dtype.name not in ("float16", "bfloat16", "float32", "float64") or narrow.dtype.name == "float8_e8m0fnu":
        return False
    return (
        wide.nmant >= narrow.nmant
        and float(wide.max) >= float(narrow.max)
        and float(wide.smallest_subnormal) <= float(narrow.smallest_subnormal)
    )
