"""What each leaf of a typed optax state is: of which state, in which field, of which param."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orbaxkit.optimizer.stored import StoredState, TextPath, text_path
from orbaxkit.paths import format_path
from orbaxkit.states import STATES, StateClass, StateField
from orbaxkit.trees import children_of


@dataclass(frozen=True)
class Place:
    """Where a leaf lies: the state at `node`, its field, and the rest of the path, which is a param's in a mirror."""

    node: TextPath
    state: StateClass
    field: str
    rest: TextPath

    @property
    def known(self) -> StateField:
        """What the field is."""
        return self.state.fields[self.field]

    @property
    def role(self) -> str:
        """`count`, `moment`, …"""
        return self.known.role

    @property
    def is_mirror(self) -> bool:
        """Whether the leaf belongs to one param."""
        return self.known.layout not in ("none", "other")


_UNKNOWN = StateClass("", "", "unknown", {"": StateField("scalar", "unknown")})


def places_of(tree: Any) -> dict[str, Place]:
    """The place of every leaf of a typed state, by the leaf's name."""
    return dict(_walk(tree, (), None))


def _walk(node: Any, path: TextPath, around: tuple[TextPath, StateClass] | None) -> Iterator[tuple[str, Place]]:
    state = class_of(type(node))
    if state is not None and state.fields:
        around = path, state
    children, _ = children_of(node)
    for key, child in children.items():
        if children_of(child)[0]:
            yield from _walk(child, (*path, key), around)
        elif _is_leaf(child):
            is_box = list(children) == ["value"] and not isinstance(node, Mapping)
            yield format_path((*path, key)), _place(path if is_box else (*path, key), around)
    if not path and _is_leaf(node):
        yield "", _place((), around)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "shape") or isinstance(node, (bool, int, float, complex))


def _place(path: TextPath, around: tuple[TextPath, StateClass] | None) -> Place:
    if around is None or len(path) == len(around[0]) or path[len(around[0])] not in around[1].fields:
        return Place(path, _UNKNOWN, "", ())
    node, state = around
    return Place(node, state, path[len(node)], path[len(node) + 1 :])


def class_of(kind: type) -> StateClass | None:
    """The table's entry for a class: of its name, and of its fields where names are shared."""
    fields = getattr(kind, "_fields", None)
    if fields is None:
        return None
    named = [state for state in STATES if state.name == kind.__name__]
    exact = [state for state in named if set(state.fields) == set(fields)]
    if exact or named:
        return (exact or named)[0]
    return unknown_class(kind)


def unknown_class(kind: Any) -> StateClass:
    """An entry for a state that is not in the table: `count` is one, of other fields nothing is known."""
    fields: Mapping[str, StateField] = {
        name: StateField("count") if name == "count" else StateField("moment", "unknown", "params")
        for name in kind._fields
    }
    return StateClass(kind.__module__, kind.__name__, kind.__name__, fields)


def stored_places(state: StoredState) -> dict[str, Place]:
    """The place of every leaf of a stored state, by its name in the checkpoint, as the table's defaults have it."""
    found = {}
    for slot in state.slots:
        for name in (name for names in slot.leaves.values() for name in names):
            path = text_path(state.specs.paths[name])
            depth = len(slot.key_path)
            found[state.names[name]] = Place(path[1:depth], slot.default, path[depth], path[depth + 1 :])
    return found
