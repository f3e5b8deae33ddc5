"""Trees in memory as a source, so that they are written as checkpoints are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orbaxkit.errors import TargetError
from orbaxkit.formats import Done, Pending, Value
from orbaxkit.paths import KeyPath
from orbaxkit.specs import LeafSpec, Specs
from orbaxkit.trees import empty_nodes, flatten

_EMPTY = {"NoneType": "None", "dict": "Dict", "list": "List", "tuple": "Tuple"}


@dataclass(frozen=True)
class MemorySource:
    """The leaves of a tree. Device arrays come to the host one leaf at a time, where the last one stays."""

    specs: Specs
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writer: str | None = None

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> Pending:
        """Copy a region."""
        out[...] = _host(self.values[name], self.specs[name])[index]
        return Done()

    def value(self, name: str) -> Value:
        """A scalar or a string."""
        return self.values[name]

    def problems(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Leaves that are descriptions, or of which other processes have a part."""
        return [(name, problem) for name in names if (problem := _problem(self.values.get(name)))]

    @property
    def tied(self) -> dict[str, str]:
        """Leaves that are the very array of an earlier one."""
        first: dict[int, str] = {}
        out = {}
        for name, value in self.values.items():
            if hasattr(value, "shape") and value.ndim and first.setdefault(id(value), name) != name:
                out[name] = first[id(value)]
        return out


def memory_source(tree: Any) -> MemorySource:
    """A tree as a source: arrays, numbers, strings; None and empty containers as empty nodes.

    Raises TargetError: a leaf that no checkpoint holds.
    """
    target = flatten(tree)
    leaves: list[tuple[KeyPath, LeafSpec]] = [
        (leaf.path, _spec(leaf.value, leaf.spec)) for leaf in target.leaves.values()
    ]
    if target.graphdef is None:
        leaves += [(path, LeafSpec(kind="empty", empty=_kind(node))) for path, node in empty_nodes(tree)]
    if not leaves:
        raise TargetError("the tree has no leaves")
    values = {name: leaf.value for name, leaf in target.leaves.items()}
    return MemorySource(Specs.of(leaves), values)


def _kind(node: Any) -> str:
    return _EMPTY.get(type(node).__name__, "NamedTuple" if hasattr(node, "_fields") else "Dict")


def _spec(value: Any, spec: LeafSpec) -> LeafSpec:
    if spec.kind != "key":
        return spec
    return replace(spec, stored_shape=(*spec.shape, *_words(value)))


def _words(keys: Any) -> tuple[int, ...]:
    import jax

    return jax.eval_shape(jax.random.key_data, keys).shape[keys.ndim :]


def _host(value: Any, spec: LeafSpec) -> np.ndarray:
    if spec.kind == "key":
        import jax

        value = jax.random.key_data(value)
    return np.asarray(value)


def _problem(value: Any) -> str | None:
    if type(value).__name__ == "ShapeDtypeStruct":
        return "is a description, not an array"
    if getattr(value, "is_fully_addressable", True) is False:
        return "lies partly on devices of other processes"
    if getattr(value, "is_deleted", bool)():
        return "was deleted: its buffer was donated"
    return None
