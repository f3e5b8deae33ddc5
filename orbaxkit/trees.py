"""Targets: flatten any pytree to named leaves, and rebuild the same containers with new leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbaxkit.errors import TargetError
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.specs import KEY_TAGS, Kind, LeafSpec, Specs

_KEY_IMPLS = {tag: impl for impl, tag in KEY_TAGS.items()}


@dataclass(frozen=True)
class TargetLeaf:
    """One leaf of a target. `is_boxed`: it lies in a box (an nnx Variable, a linen Partitioned), under `value`."""

    path: KeyPath
    value: Any
    spec: LeafSpec
    is_boxed: bool

    @property
    def is_abstract(self) -> bool:
        """Whether it is a `jax.ShapeDtypeStruct`: a description, not data."""
        import jax

        return isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def sharding(self) -> Any:
        """The sharding it asks for, or None."""
        return getattr(self.value, "sharding", None)


@dataclass(frozen=True)
class Target:
    """A flattened tree: leaves by path text, the first-level keys that it has, and how to rebuild it."""

    leaves: Mapping[str, TargetLeaf]
    top_level: frozenset[str]
    treedef: Any
    graphdef: Any = None  # of an nnx module

    @property
    def specs(self) -> Specs:
        """What the leaves ask for."""
        return Specs.of((leaf.path, leaf.spec) for leaf in self.leaves.values())

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The same containers around `values`, one for each leaf by path text."""
        tree = self.treedef.unflatten([values[name] for name in self.leaves])
        if self.graphdef is None:
            return tree
        from flax import nnx

        return nnx.merge(self.graphdef, tree)


def flatten(tree: Any) -> Target:
    """Flatten a concrete or abstract tree: dicts, TrainState, nnx State or module, dataclass, NamedTuple, lists…

    Raises TargetError where a leaf is neither an array, a number nor a string.
    """
    import jax

    graphdef, tree = _split_module(tree)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, TargetLeaf] = {}
    foreign = []
    for keys, value in pairs:
        path = tuple(_segment(key) for key in keys)
        spec = spec_of(value)
        name = format_path(path)
        if spec is None or name in leaves:
            foreign.append((name, f"a {type(value).__name__}" if spec is None else "two keys have this text"))
        else:
            leaves[name] = TargetLeaf(path, value, spec, _is_boxed(keys))
    if foreign:
        raise TargetError(
            "the target has leaves that are no array, number or string",
            leaves=foreign,
            hint="register your own classes with jax.tree_util, or keep them out of the target",
        )
    return Target(leaves, _top_level(tree), treedef, graphdef)


def _split_module(tree: Any) -> tuple[Any, Any]:
    """An nnx module as (graphdef, state), which keeps shared variables shared; any other tree as (None, tree)."""
    if not any(base.__module__.startswith("flax.nnx") for base in type(tree).__mro__):
        return None, tree
    from flax import nnx

    return nnx.split(tree) if isinstance(tree, (nnx.Module, nnx.Optimizer)) else (None, tree)


def _segment(key: Any) -> str | int:
    """A jax key as a segment: sequence indices stay numbers, everything else goes by its text."""
    import jax

    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)):
        return str(key.key)
    return str(key)


def _is_boxed(keys: tuple[Any, ...]) -> bool:
    """Boxes flatten to one attribute called `value`; a dict key of that name is no box."""
    import jax

    return bool(keys) and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value"


def _top_level(tree: Any) -> frozenset[str]:
    return frozenset(name for name, child in children_of(tree)[0].items() if child is not None)


def children_of(node: Any) -> tuple[dict[str, Any], Any]:
    """One level of a tree: its children by the text of their keys, and the treedef that puts them back."""
    import jax

    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return {str(_segment(keys[0])): child for keys, child in pairs if keys}, treedef


def empty_nodes(tree: Any) -> list[tuple[KeyPath, Any]]:
    """The nodes that hold no leaf: None, and empty containers."""
    import jax

    def is_empty(node: Any) -> bool:
        return node is None or (not jax.tree_util.all_leaves([node]) and not children_of(node)[0])

    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
    return [(tuple(_segment(key) for key in keys), node) for keys, node in pairs if is_empty(node)]


def spec_of(value: Any) -> LeafSpec | None:
    """What a leaf in memory is; None where it is nothing that a checkpoint can hold."""
    if isinstance(value, str):
        return LeafSpec(kind="string", stored_bytes=len(value.encode("utf-8", "surrogatepass")))
    if isinstance(value, (bool, int, float, complex)):
        return LeafSpec(kind="scalar", dtype=np.dtype(type(value)))
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return None
    name = str(value.dtype)
    if name.startswith("key<"):
        return LeafSpec(tuple(value.shape), np.dtype("uint32"), "key", key_impl=_KEY_IMPLS.get(name[4:-1], name[4:-1]))
    kind: Kind = "scalar" if isinstance(value, np.generic) else "numpy" if isinstance(value, np.ndarray) else "array"
    dtype = np.dtype(value.dtype)
    return LeafSpec(tuple(value.shape), dtype if dtype.isnative else np.dtype(dtype.name), kind)


def as_leaf(value: Any, wanted: TargetLeaf) -> Any:
    """A number or a 0-d array as the target's type: a Python number, a numpy scalar or a 0-d numpy array.

    Raises ValueError where the value does not survive exactly.
    """
    if isinstance(wanted.value, (bool, int, float, complex)):
        number = np.asarray(value).item()
        return _same(type(wanted.value)(number), number)
    array = np.asarray(value)
    if array.dtype == object or wanted.spec.dtype is None:
        raise ValueError(value)
    with np.errstate(all="ignore"):
        cast = array.astype(wanted.spec.dtype)
        _same(cast.astype(array.dtype).item(), array.item())
    return cast[()] if wanted.spec.kind == "scalar" else cast


def _same(converted: Any, original: Any) -> Any:
    if converted != original and not (converted != converted and original != original):
        raise ValueError(original)
    return converted
