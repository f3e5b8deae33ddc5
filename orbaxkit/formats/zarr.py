"""Zarr metadata, versions 2 and 3: what an array is and which stored values it has. No array bytes are read here."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import checked_sizes, parse_json
from orbaxkit.specs import DTYPES

METADATA_NAMES = (".zarray", "zarr.json")
_NUMPY_DTYPE = re.compile(r"[<>|=][biufc](?:1|2|4|8|16)")


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array's metadata. A stored value is a chunk, or with zarr 3 sharding a shard that holds chunks."""

    driver: str  # as TensorStore names it: "zarr" (version 2) or "zarr3"
    shape: tuple[int, ...]
    dtype: np.dtype  # in the machine's byte order
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...] | None
    separator: str
    prefix: str  # of the keys of stored values
    codec: str | None  # how a chunk's C-ordered little-endian bytes are stored: "raw" or "zstd"; None: some other way

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape of one stored value."""
        return self.shard_shape or self.chunk_shape

    @property
    def grid(self) -> tuple[int, ...]:
        """How many stored values there are along each axis."""
        return tuple(-(-size // max(step, 1)) for size, step in zip(self.shape, self.value_shape, strict=True))

    @property
    def value_bytes(self) -> int:
        """The bytes of one whole stored value, decoded."""
        return math.prod(self.value_shape) * self.dtype.itemsize

    def key(self, position: tuple[int, ...]) -> str:
        """The key of the stored value at a position of the grid."""
        text = self.separator.join(map(str, position))
        if not self.prefix:
            return text or "0"
        return f"{self.prefix}{self.separator}{text}" if text else self.prefix

    def keys(self) -> Iterator[str]:
        """The keys of all stored values, one at a time: a file may claim more than could be listed."""
        return (self.key(position) for position in _positions(self.grid))


def _positions(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """itertools.product, which would first make a tuple of each axis."""
    if not grid:
        return iter([()])
    return ((first, *rest) for first in range(grid[0]) for rest in _positions(grid[1:]))


def parse(name: str, data: bytes, where: str) -> ZarrArray:
    """Parse `.zarray` or `zarr.json`."""
    array = _parse_cached(name, data)
    if isinstance(array, str):
        raise CheckpointError(f"{name} {array}", where=where)
    return array


@lru_cache(maxsize=1024)
def _parse_cached(name: str, data: bytes) -> ZarrArray | str:
    """Most arrays of a checkpoint share a few distinct metadata documents. What is wrong comes back as text."""
    try:
        meta = parse_json(data, name)
        if not isinstance(meta, dict):
            return "is not a JSON object"
        return _parse_2(meta, name) if name == ".zarray" else _parse_3(meta, name)
    except CheckpointError as error:
        return str(error).split("\n")[0].removeprefix(f"{name} ")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        return f"is not zarr metadata: {type(error).__name__} {error}"


def _parse_2(meta: dict[str, Any], name: str) -> ZarrArray:
    shape, chunks = _shapes(meta["shape"], meta["chunks"], name)
    return ZarrArray(
        driver="zarr",
        shape=shape,
        dtype=_dtype_2(meta["dtype"]),
        chunk_shape=chunks,
        shard_shape=None,
        separator=_separator(meta.get("dimension_separator", ".")),
        prefix="",
        codec=_codec_2(meta),
    )


def _parse_3(meta: dict[str, Any], name: str) -> ZarrArray:
    if meta.get("node_type", "array") != "array":
        raise CheckpointError(f"describes a {meta['node_type']}, not an array")
    grid = meta["chunk_grid"]
    if grid["name"] != "regular":
        raise CheckpointError(f"has a chunk grid that is not regular: {grid['name']}")
    shape, outer = _shapes(meta["shape"], grid["configuration"]["chunk_shape"], name)
    separator, prefix = _keys_3(meta.get("chunk_key_encoding") or {"name": "default"})
    sharding = next((codec["configuration"] for codec in meta["codecs"] if codec["name"] == "sharding_indexed"), None)
    inner = outer if sharding is None else checked_sizes(sharding["chunk_shape"], name, "chunk_shape")
    if len(inner) != len(shape) or not all(inner):
        raise CheckpointError(f"has chunks {inner} for shape {shape}")
    dtype = meta["data_type"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"names an unknown dtype: {str(dtype)[:60]}")
    return ZarrArray(
        driver="zarr3",
        shape=shape,
        dtype=DTYPES[dtype],
        chunk_shape=inner,
        shard_shape=None if sharding is None else outer,
        separator=separator,
        prefix=prefix,
        codec=_codec_3(meta["codecs"]) if sharding is None else _sharded_codec(meta["codecs"], sharding),
    )


def _codec_2(meta: dict[str, Any]) -> str | None:
    if meta.get("order", "C") != "C" or meta.get("filters") or str(meta["dtype"]).startswith(">"):
        return None
    compressor = meta.get("compressor")
    return "raw" if compressor is None else "zstd" if compressor.get("id") == "zstd" else None


def _codec_3(codecs: list[dict[str, Any]]) -> str | None:
    """`bytes`, or `bytes` then `zstd`; one-byte elements need no endianness."""
    endian = (codecs[0].get("configuration") or {}).get("endian", "little")
    names = [codec["name"] for codec in codecs]
    return {("bytes",): "raw", ("bytes", "zstd"): "zstd"}.get(tuple(names)) if endian == "little" else None


def _sharded_codec(codecs: list[dict[str, Any]], sharding: dict[str, Any]) -> str | None:
    """Of the chunks inside, where shards are the only codec and their index lies at their end as Orbax writes it."""
    index = [codec["name"] for codec in sharding.get("index_codecs", ())]
    is_usual = len(codecs) == 1 and index == ["bytes", "crc32c"] and sharding.get("index_location", "end") == "end"
    is_usual = is_usual and _codec_3(sharding["index_codecs"][:1]) == "raw"
    return _codec_3(sharding["codecs"]) if is_usual else None


def _shapes(shape: Any, chunks: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = checked_sizes(shape, where, "shape")
    chunks = checked_sizes(chunks, where, "chunks")
    if len(shape) != len(chunks) or any(size and not step for size, step in zip(shape, chunks, strict=False)):
        raise CheckpointError(f"has chunks {chunks} for shape {shape}")
    return shape, chunks


def _dtype_2(name: Any) -> np.dtype:
    """`<f4`, `|b1`, `>i8`, and names that numpy lacks: `bfloat16`, `float8_e4m3fn`, `int4`."""
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    if isinstance(name, str) and _NUMPY_DTYPE.fullmatch(name):
        try:
            return DTYPES[np.dtype(name).name]
        except (TypeError, KeyError):
            pass
    raise CheckpointError(f"names an unknown dtype: {str(name)[:60]}")


def _separator(text: Any) -> str:
    if text not in (".", "/"):
        raise CheckpointError(f"has the dimension separator {str(text)[:20]!r}")
    return text


def _keys_3(encoding: Any) -> tuple[str, str]:
    name, settings = (encoding, {}) if isinstance(encoding, str) else (encoding["name"], encoding.get("configuration"))
    if name not in ("default", "v2"):
        raise CheckpointError(f"has the chunk key encoding {str(name)[:20]!r}")
    default = ("/", "c") if name == "default" else (".", "")
    return _separator((settings or {}).get("separator", default[0])), default[1]


def missing_key(array: ZarrArray, present: set[str]) -> str | None:
    """The first stored value that is not there; looks at no more keys than one beyond those present."""
    keys = itertools.islice(array.keys(), len(present) + 1)
    return next((key for key in keys if key not in present), None)
