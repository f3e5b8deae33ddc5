"""Rebuild a tree whose leaves moved, came and went, in the same kinds of containers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from orbaxkit.errors import TargetError
from orbaxkit.paths import KeyPath, Segment, format_path, is_index, natural_order
from orbaxkit.trees import TargetLeaf, children_of

# Where boxes keep the names of their axes: linen's Partitioned, nnx Variables of flax 0.12 and before.
_AXIS_NAMES = ("names", "out_sharding", "sharding_names", "sharding")


@dataclass(frozen=True)
class Grown:
    """A leaf of a changed tree: its typed path, its value, and the leaf of the old tree that it comes from.

    `keeps_axes`: its axes are still those of that leaf.
    """

    path: KeyPath
    value: Any
    origin: TargetLeaf | None
    keeps_axes: bool = True


def regrow(tree: Any, leaves: list[Grown]) -> Any:
    """The new leaves in the containers that they were in, wherever those are now.

    A subtree that only moved, or of which there are now many, keeps its types; all that is new is dicts and lists.
    Containers with fixed fields (TrainState, NamedTuple, dataclass, box) are refused where leaves of a field came or
    went.
    """
    nursery = _Nursery(tree)
    bent = [(leaf, nursery.axis_names(leaf)) for leaf in leaves if not leaf.keeps_axes]
    if any(names for _, names in bent):
        raise TargetError(
            "a box that names its axes cannot hold an array of other axes",
            leaves=[(format_path(leaf.path), f"its box names {names}") for leaf, names in bent if names],
            hint="unbox first: flax.linen.unbox(tree), or nnx.to_pure_dict(state)",
        )
    return nursery.grow(leaves, 0)


@dataclass(frozen=True)
class _Nursery:
    tree: Any
    _nodes: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def grow(self, leaves: list[Grown], depth: int) -> Any:
        """The node that holds these leaves, which share the first `depth` segments of their paths."""
        if len(leaves) == 1 and len(leaves[0].path) == depth:
            return leaves[0].value
        below: dict[str, list[Grown]] = {}  # by text: an index and a key of the same text are one place
        for leaf in leaves:
            below.setdefault(str(leaf.path[depth]), []).append(leaf)
        keys = {found[0].path[depth]: found for found in below.values()}
        grown = {key: self.grow(keys[key], depth + 1) for key in natural_order(keys)}
        path = leaves[0].path[:depth]
        return _contain(self._old(leaves, depth), grown, path)

    def _old(self, leaves: list[Grown], depth: int) -> Any:
        """The container that held these leaves, if one held them all in the same places; else what was at this path."""
        origins = {_origin_of_node(leaf, depth) for leaf in leaves}
        (path,) = origins if len(origins) == 1 else (None,)
        return self._at(tuple(map(str, leaves[0].path[:depth])) if path is None else path)

    def axis_names(self, leaf: Grown) -> Any:
        """The names that the leaf's old box (linen's Partitioned, an nnx Variable with sharding) gives its axes."""
        if leaf.origin is None or not leaf.origin.is_boxed:
            return None
        box = self._at(tuple(map(str, leaf.origin.path[:-1])))
        metadata = box.get_metadata() if hasattr(box, "get_metadata") else {"names": getattr(box, "names", None)}
        return next((metadata[key] for key in _AXIS_NAMES if metadata.get(key)), None)

    def _at(self, path: tuple[str, ...]) -> Any:
        if not path:
            return self.tree
        if path not in self._nodes:
            parent = self._at(path[:-1])
            self._nodes[path] = None if parent is None else children_of(parent)[0].get(path[-1])
        return self._nodes[path]


def _origin_of_node(leaf: Grown, depth: int) -> tuple[str, ...] | None:
    inside = tuple(map(str, leaf.path[depth:]))
    origin = tuple(map(str, leaf.origin.path)) if leaf.origin else ()
    return origin[: len(origin) - len(inside)] if inside and origin[-len(inside) :] == inside else None


def _contain(old: Any, grown: dict[Segment, Any], path: KeyPath) -> Any:
    """The container of these children: of the type of `old`, with what is empty in it where it was."""
    is_sequence = list(grown) == list(range(len(grown)))
    if old is None or jax.tree_util.all_leaves([old]):
        return list(grown.values()) if is_sequence else {str(key): child for key, child in grown.items()}
    fields, treedef = children_of(old)
    new = {str(key): child for key, child in grown.items()}
    empty = {name: child for name, child in fields.items() if not jax.tree.leaves(child)}
    if (new | empty).keys() == fields.keys():
        return treedef.unflatten([new.get(name, child) for name, child in fields.items()])
    if isinstance(old, Mapping):
        return _mapping(old, empty | new)
    if type(old) in (list, tuple) and is_sequence:
        return type(old)(grown.values())
    raise _no_place(old, new, fields, set(empty), path)


def _mapping(old: Mapping, new: dict[str, Any]) -> Any:
    """The same type of mapping; numeric keys stay numbers where the old ones were."""
    keys = {str(key): key for key in old}
    are_numbers = bool(old) and all(isinstance(key, int) for key in old)
    named = {keys.get(key, int(key) if are_numbers and is_index(key) else key): child for key, child in new.items()}
    return type(old)(named)  # type: ignore[call-arg]


def _no_place(old: Any, new: dict[str, Any], fields: dict[str, Any], empty: set[str], path: KeyPath) -> TargetError:
    changed = [(name, "has no place") for name in new if name not in fields]
    changed += [(name, "would have no leaves") for name in fields if name not in new and name not in empty]
    return TargetError(
        f"a {type(old).__name__} cannot hold the result",
        leaves=[(format_path((*path, name)), problem) for name, problem in changed],
        hint="apply to the dicts inside it, such as state.params, or unbox first",
    )
