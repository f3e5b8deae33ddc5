"""Which optax states a stored optimizer state is made of, from field names, order, shapes and stored class names."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orbaxkit.arguments import mapping
from orbaxkit.errors import CheckpointError
from orbaxkit.optimizer.stored import StoredState, TextPath, text_path
from orbaxkit.paths import KeyPath, Segment, format_path, is_index, parse_path
from orbaxkit.slots import Slot
from orbaxkit.states import STATES, StateClass, StateField, candidates

How = Literal["certain", "inferred", "ambiguous"]
Make = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Guess:
    """What a node was taken for, how sure that is, and what else it could be."""

    path: str
    name: str
    how: How
    candidates: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        others = f": {' or '.join(self.candidates)}" if self.how == "ambiguous" else ""
        return f"{self.path or '(root)'} {self.name} ({self.how}{others}{'; ' * bool(self.why)}{self.why})"


@dataclass(frozen=True)
class Makers:
    """What to make of what is found: a state of a class (ours, or the caller's own), a leaf, something empty."""

    state: Make
    leaf: Callable[[str], Any]
    empty: Callable[[str], Any]


NOTHING = Makers(lambda state, fields: None, lambda name: None, lambda name: None)

# Fields whose entries are of one class, whatever else their field names could mean.
_WITHIN = {"hyperparams_states": "WrappedScheduleState", "inner_states": "MaskedState"}
_DICTS = (*_WITHIN, "hyperparams", "measure_states")
_EMPTIES = ("None", "EmptyState", "MaskedNode")
_HELD = {"Dict": "dict", "List": "list"}


def infer(
    state: StoredState, assume: Mapping[str, Any] | None = None, makers: Makers = NOTHING
) -> tuple[Any, tuple[Guess, ...]]:
    """Make the typed state (with `makers`), and tell what every node was taken for.

    `assume` settles nodes by their path in the checkpoint: `{"opt_state/1/0": optax.ScaleByBeliefState}`.
    Raises CheckpointError: an assumed class that does not have the node's fields, or a path that is no node.
    """
    assumed = {text_path(parse_path(path)): kind for path, kind in mapping("assume", assume).items()}
    search = _Inference(state, assumed, makers, {text_path(slot.key_path): slot for slot in state.slots})
    made = search.node(_nested(state), (), None)
    search.refuse_idle()
    return made, tuple(search.guesses)


def _nested(state: StoredState) -> Any:
    """The state's leaves, by name, in nested dicts with typed keys."""
    root: dict[Segment, Any] = {}
    for name, path in state.specs.paths.items():
        if path == ("opt_state",):
            return name
        node = root
        for segment in path[1:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = name
    return root


@dataclass(frozen=True)
class _Inference:
    state: StoredState
    assumed: Mapping[TextPath, Any]
    makers: Makers
    slots: Mapping[TextPath, Slot]
    guesses: list[Guess] = field(default_factory=list)
    used: set[TextPath] = field(default_factory=set)

    def node(self, node: Any, path: KeyPath, within: str | None) -> Any:
        """A node where a state, or a container of states, is expected."""
        full = text_path(self.state.root + path)
        if full in self.assumed:
            return self._assumed(node, path, full)
        if isinstance(node, str):
            return self._leaf_or_empty(node, path)
        slot = self.slots.get(("opt_state", *text_path(path)))
        if slot is not None:
            return self._slot(slot, node, path, within)
        if node and all(is_index(str(key)) for key in node):
            return self._sequence(node, path)
        made = {str(key): self.node(child, (*path, key), within) for key, child in node.items()}
        if within in _DICTS:
            return made
        self._guess(path, "OrderedDict", "inferred", why="as optax.named_chain keeps its states")
        return OrderedDict(made)

    def _leaf_or_empty(self, name: str, path: KeyPath) -> Any:
        spec = self.state.specs[name]
        if spec.kind != "empty":
            return self.makers.leaf(name)
        kind = _HELD.get(spec.empty or "", "EmptyState")
        self._guess(path, kind, "inferred", why="nothing is stored here")
        return self.makers.empty(kind)

    def _sequence(self, node: dict[Segment, Any], path: KeyPath) -> tuple[Any, ...]:
        """The states of a chain; where NNX left a gap, a state without leaves stood."""
        found = {int(key): (key, child) for key, child in node.items()}
        entries = []
        for i in range(max(found) + 1):
            if i in found:
                entries.append(self.node(found[i][1], (*path, found[i][0]), None))
            else:
                self._guess((*path, str(i)), "EmptyState", "inferred", why="a gap in the chain")
                entries.append(self.makers.empty("EmptyState"))
        if any(isinstance(key, str) for key in node):
            why = "empty states after the last entry leave no trace in an NNX save"
            self._guess(path, "tuple", "ambiguous", ("tuple", "a longer tuple"), why)
        return tuple(entries)

    def _slot(self, slot: Slot, node: dict[Segment, Any], path: KeyPath, within: str | None) -> Any:
        chosen, how, why = self._choose(slot, node, path, within)
        others = tuple(state.name for state in slot.candidates)
        self._guess(path, chosen.name, how, others if how == "ambiguous" else (), why)
        children = {str(key): (key, child) for key, child in node.items()}
        fields = {name: self._field(children.get(name), known, name, path) for name, known in chosen.fields.items()}
        return self.makers.state(chosen, fields)

    def _choose(
        self, slot: Slot, node: dict[Segment, Any], path: KeyPath, within: str | None
    ) -> tuple[StateClass, How, str]:
        names = {str(key) for key in node}
        stored = self.state.whole.containers.get(format_path(self.state.root + path), "").rpartition(".")[2]
        named = [state for state in STATES if state.name == stored and names <= state.fields.keys()]
        if named:
            return named[0], "certain", "its class is stored"
        by_context = [state for state in slot.candidates if state.name == _WITHIN.get(within or "")]
        if by_context:
            return by_context[0], "inferred", f"an entry of {within}"
        possible = candidates(frozenset(names))
        if len(possible) == 1:
            return possible[0], "certain", ""
        fits = _in_order(slot.candidates, [str(key) for key in node])
        if len(fits) == 1:
            return fits[0], "inferred", "by its shapes" if fits == slot.candidates else "by the order of its fields"
        return fits[0], "ambiguous", ""

    def _field(self, found: tuple[Segment, Any] | None, known: StateField, name: str, path: KeyPath) -> Any:
        if found is None or self._is_none(found[1]):
            return self._absent(known, name, found)
        key, child = found
        if known.role == "inner state":
            return self.node(child, (*path, key), name)
        return self.tree(child, (*path, key))

    def _is_none(self, child: Any) -> bool:
        return isinstance(child, str) and self.state.specs[child].kind == "empty"

    def _absent(self, known: StateField, name: str, found: tuple[Segment, Any] | None) -> Any:
        """What a field without leaves holds: what the file says, else what optax puts there."""
        told = None if found is None else self.state.specs[found[1]].empty
        if name in _DICTS or told == "Dict":
            return {}
        if name == "skip_state" or (told == "Tuple" and known.role != "inner state"):
            return ()
        return self.makers.empty("EmptyState" if known.role == "inner state" else "None")

    def tree(self, node: Any, path: KeyPath) -> Any:
        """What mirrors the params: dicts and lists; a param that this state does not see is a MaskedNode."""
        if isinstance(node, str):
            if self.state.specs[node].kind != "empty":
                return self.makers.leaf(node)
            full = text_path(self.state.root + path)
            if full in self.assumed:
                return self._assumed(node, path, full)
            like = self._empty_param(path)
            self._guess(path, like or "MaskedNode", "inferred" if like else "ambiguous", () if like else _EMPTIES)
            return self.makers.empty(like or "MaskedNode")
        made = {key: self.tree(child, (*path, key)) for key, child in node.items()}
        if made and sorted(made, key=str) == sorted(range(len(made)), key=str):
            kind = self.state.whole.containers.get(format_path(self.state.root + path))
            return (tuple if kind == "tuple" else list)(made[i] for i in range(len(made)))
        return {str(key): child for key, child in made.items()}

    def _empty_param(self, path: KeyPath) -> str | None:
        """What the param is that an empty node mirrors, where it is empty itself."""
        root = self.state.params
        if root is None:
            return None
        names = (format_path((*root, *path[k:])) for k in range(len(path)))
        found = next((self.state.whole.leaves[name] for name in names if name in self.state.whole.leaves), None)
        return None if found is None or found.kind != "empty" else found.empty

    def _assumed(self, node: Any, path: KeyPath, full: TextPath) -> Any:
        kind = self.assumed[full]
        self.used.add(full)
        fields = getattr(kind, "_fields", None)
        keys = [] if isinstance(node, str) else [str(key) for key in node]
        if fields is None or not set(keys) <= set(fields):
            wanted = f"has the fields {', '.join(keys) or '(none)'}"
            raise CheckpointError(
                f"{getattr(kind, '__name__', kind)} cannot be assumed here",
                leaves=[(format_path(self.state.root + path), wanted)],
                hint="assume an optax state class (a NamedTuple) with these fields",
            )
        self._guess(path, kind.__name__, "certain", why="assumed")
        table = next((s for s in STATES if s.name == kind.__name__ and set(s.fields) == set(fields)), None)
        children = {} if isinstance(node, str) else {str(key): (key, child) for key, child in node.items()}
        usual = StateField("moment", layout="params")
        known = {name: usual if table is None else table.fields[name] for name in fields}
        return self.makers.state(kind, {n: self._field(children.get(n), known[n], n, path) for n in fields})

    def refuse_idle(self) -> None:
        """A path in `assume` that is no node of the state is a mistake."""
        idle = [path for path in self.assumed if path not in self.used]
        if idle:
            nodes = ", ".join(guess.path for guess in self.guesses if guess.how == "ambiguous") or "none is ambiguous"
            leaves = [(format_path(path), "is no node where a state can be assumed") for path in idle]
            raise CheckpointError("assume= names nodes that are not there", leaves=leaves, hint=f"ambiguous: {nodes}")

    def _guess(self, path: KeyPath, name: str, how: How, options: tuple[str, ...] = (), why: str = "") -> None:
        self.guesses.append(Guess(format_path(self.state.root + path), name, how, options, why))


def _in_order(options: tuple[StateClass, ...], keys: list[str]) -> tuple[StateClass, ...]:
    """Where classes have the same fields in different orders, those of the order on disk."""
    orders = {tuple(state.fields) for state in options}
    same = tuple(state for state in options if list(state.fields) == keys)
    return same if len(orders) > 1 and same else options
