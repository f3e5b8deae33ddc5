"""Reading regions of stored arrays through TensorStore, whose errors become one short line each."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from orbaxkit.errors import CheckpointError
from orbaxkit.formats import Done, Pending
from orbaxkit.formats.ocdbt import short_reason
from orbaxkit.formats.stores import ArrayStore
from orbaxkit.formats.zarr import ZarrArray

_NODE_CACHE_BYTES = 32 << 20
_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},  # each chunk is wanted once
    "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},  # else every chunk would read the index again
    "data_copy_concurrency": {"limit": 4},
    "file_io_concurrency": {"limit": 16},
}


@dataclass(frozen=True)
class Reader:
    """Opens arrays of one store as they are asked for. Its context is its own: a shared one remembers old manifests."""

    store: ArrayStore
    _opened: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _context(self) -> Any:
        import tensorstore as ts

        return ts.Context(_CONTEXT | self.store.folder.context)

    def read(
        self, leaf: str, name: str, array: ZarrArray, has_fill: bool, index: tuple[slice, ...], out: np.ndarray
    ) -> Pending:
        """Start reading a region of a stored array into `out`."""
        if out.size == 0:
            return Done()
        import tensorstore as ts

        try:
            opened = self._open(name, array, has_fill)
            return _Read(leaf, self.store.where(name), ts.array(out).write(opened[index]))
        except Exception as error:
            raise _unreadable(leaf, self.store.where(name), error) from None

    def _open(self, name: str, array: ZarrArray, has_fill: bool) -> Any:
        import tensorstore as ts

        if name not in self._opened:
            spec = {
                "driver": array.driver,
                "kvstore": self.store.kvstore(name),
                "fill_missing_data_reads": has_fill,
                "recheck_cached_data": False,
            }
            self._opened[name] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._opened[name]


@dataclass(frozen=True, slots=True)
class _Read:
    leaf: str
    where: str
    future: Any

    def result(self) -> None:
        """Wait for TensorStore."""
        try:
            self.future.result()
        except Exception as error:
            raise _unreadable(self.leaf, self.where, error) from None


def _unreadable(leaf: str, where: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError("a leaf cannot be read", leaves=[(leaf, short_reason(error))], where=where)
