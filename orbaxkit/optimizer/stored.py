"""The optimizer state of a checkpoint: where it lies, its leaves by their paths within it, its slots."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from orbaxkit import slots as table
from orbaxkit.errors import CheckpointError
from orbaxkit.paths import KeyPath, format_path, is_index, parse_path
from orbaxkit.slots import Slot, find_slots, is_optimizer_name
from orbaxkit.specs import LeafSpec, Specs
from orbaxkit.states import candidates

# Paths within a state hang below this name, so that every field set in it is known to be an optimizer's.
TOP: KeyPath = ("opt_state",)
_OUTSIDE: KeyPath = ("outside",)

Pairs = list[tuple[KeyPath, LeafSpec]]
TextPath = tuple[str, ...]


@dataclass(frozen=True)
class StoredState:
    """One optimizer state of a checkpoint, at `root` of the tree `whole`.

    `specs` has its leaves below `opt_state`, without the `value` level of NNX; `names` gives those in the checkpoint.
    """

    root: KeyPath
    whole: Specs
    specs: Specs
    names: Mapping[str, str]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The optax states in it, outer ones before inner ones."""
        return find_slots(self.specs)

    @cached_property
    def by_path(self) -> Mapping[TextPath, str]:
        """The checkpoint's names of the leaves that hold something, by their paths within the state.

        NNX leaves are here with and without their `value` level.
        """
        found: dict[TextPath, str] = {}
        for name, stored in self.names.items():
            if self.specs[name].kind != "empty":
                found[text_path(self.specs.paths[name][1:])] = stored
                found.setdefault(text_path(self.whole.paths[stored][len(self.root) :]), stored)
        return found

    def stored_path(self, path: KeyPath) -> str:
        """The text of a node's path in the checkpoint, from its path below `opt_state`."""
        return format_path(self.root + path[1:])

    @cached_property
    def params(self) -> KeyPath | None:
        """The subtree of the checkpoint that holds the params which this state mirrors: the nearest one."""
        for k in range(len(self.root), -1, -1):
            found = self._params_within(self.root[:k])
            if found is not None:
                return found
        return None

    def _params_within(self, around: KeyPath) -> KeyPath | None:
        others = (self.root, *find_states(self.whole))
        outside = [
            (_OUTSIDE + path, self.whole.leaves[name])
            for name, path in self.whole.paths.items()
            if path[: len(around)] == around and not any(path[: len(root)] == root for root in others)
        ]
        inside = [(path, self.specs[name]) for name, path in self.specs.paths.items()]
        namesake = [(path, spec) for path, spec in outside if self.root and self.root[-1] in path]
        tries = (some for some in (namesake, outside) if some)
        roots = (table.mirrored_root(Specs.of([*inside, *some]), self.slots) for some in tries)
        found = next((root for root in roots if root is not None), None)
        if found is None and not any(slot.mirrors for slot in self.slots):  # nothing tells but a name beside it
            beside = (*_OUTSIDE, *self.root[:-1], "params")
            found = beside if any(path[: len(beside)] == beside for path, _ in outside) else None
        return None if found is None else found[1:]

    @cached_property
    def mirrored(self) -> Mapping[KeyPath, LeafSpec]:
        """What the state tells of the params: path within them -> a moment of the same shape."""
        found: dict[KeyPath, LeafSpec] = {}
        for slot in self.slots:
            for field in slot.mirrors:
                if slot.default.fields[field].layout == "params":
                    for name in slot.mirrors[field]:
                        found.setdefault(slot.param_of(self.specs, name), self.specs[name])
        return found


def text_path(path: KeyPath) -> TextPath:
    """A path whose segments compare by text."""
    return tuple(map(str, path))


def find_states(specs: Specs) -> tuple[KeyPath, ...]:
    """The paths of all optimizer states: nodes named like one, and chains of states that their fields give away."""
    named = dict.fromkeys(_named(path) for path in specs.paths.values())
    roots = [root for path in named if path is not None for root in _several(specs, _descend(specs, path))]
    for slot in find_slots(specs):
        chain = slot.key_path
        while chain and is_index(str(chain[-1])):
            chain = chain[:-1]
        if not any(chain[: len(root)] == root or root[: len(chain)] == chain for root in roots):
            roots.append(chain)
    return tuple(dict.fromkeys(roots))


def _several(specs: Specs, root: KeyPath) -> Iterator[KeyPath]:
    """The states below a node that has one for each network: its keys are those of the params (`gen`, `disc`)."""
    depth = len(root)
    keys = dict.fromkeys(path[depth] for path in specs.paths.values() if path[:depth] == root and len(path) > depth)
    outside = {path[:k] for path in specs.paths.values() if path[:depth] != root for k in range(1, len(path))}
    around = {node[:-1] for node in outside if node[-1] in keys}
    is_several = len(keys) > 1 and any(all((*one, key) in outside for key in keys) for one in around)
    yield from ((*root, key) for key in keys) if is_several else [root]


def _named(path: KeyPath) -> KeyPath | None:
    depth = next((k for k, segment in enumerate(path) if is_optimizer_name(segment)), None)
    return None if depth is None else path[: depth + 1]


def _descend(specs: Specs, path: KeyPath) -> KeyPath:
    """`optimizer/opt_state` where `optimizer` is no state itself but holds one (an nnx.Optimizer)."""
    inside = [p[len(path) :] for p in specs.paths.values() if p[: len(path)] == path and len(p) > len(path)]
    children = dict.fromkeys(rest[0] for rest in inside)
    inner = [child for child in children if is_optimizer_name(child)]
    is_state = bool(children) and bool(candidates(frozenset(map(str, children))))
    return (*path, inner[0]) if len(inner) == 1 and not is_state else path


def stored_state(specs: Specs, at: str | None = None, where: object = None) -> StoredState:
    """The one optimizer state of a tree, or the one at a path.

    Raises CheckpointError: there is none, or several and no `at`; all are listed.
    """
    if at is not None:
        return _state(specs, _path_at(specs, at, where))
    roots = find_states(specs)
    if len(roots) == 1:
        return _state(specs, roots[0])
    if not roots:
        hint = 'if it has another name, say where: at="…"; for a fresh one: tx.init(params)'
        raise CheckpointError("no optimizer state in this checkpoint", leaves=_tops(specs), where=where, hint=hint)
    raise CheckpointError(
        f"{len(roots)} optimizer states in this checkpoint",
        leaves=[(format_path(root), "") for root in roots],
        where=where,
        hint=f"name one: at={format_path(roots[0])!r}",
    )


def _tops(specs: Specs) -> list[tuple[str, str]]:
    return [(format_path(path), "is here") for path in dict.fromkeys(path[:1] for path in specs.paths.values())]


def _path_at(specs: Specs, at: str, where: object) -> KeyPath:
    wanted = text_path(parse_path(at))
    for path in specs.paths.values():
        if text_path(path[: len(wanted)]) == wanted:
            return path[: len(wanted)]
    known = ", ".join(format_path(root) for root in find_states(specs)) or "none is recognised"
    raise CheckpointError(f"nothing lies at {at!r}", where=where, hint=f"optimizer states: {known}")


def _state(specs: Specs, root: KeyPath) -> StoredState:
    inside = {name: path[len(root) :] for name, path in specs.paths.items() if path[: len(root)] == root}
    children: dict[KeyPath, set[str]] = {}
    for path in inside.values():
        for k in range(len(path)):
            children.setdefault(path[:k], set()).add(str(path[k]))
    leaves: Pairs = []
    names: dict[str, str] = {}
    for name, path in inside.items():
        is_box = len(path) > 1 and path[-1] == "value" and len(children[path[:-1]]) == 1
        path = TOP + (path[:-1] if is_box else path)
        leaves.append((path, specs.leaves[name]))
        names[format_path(path)] = name
    return StoredState(root, specs, Specs.of(leaves), names)


def leaves_below(specs: Specs, root: KeyPath) -> dict[TextPath, str]:
    """The names of the leaves of a subtree by their paths within it, with and without a `value` at the end."""
    found: dict[TextPath, str] = {}
    for name, path in specs.paths.items():
        if path[: len(root)] == root and specs.leaves[name].kind != "empty":
            found[text_path(path[len(root) :])] = name
            found.setdefault(text_path(table.strip_value(path[len(root) :])), name)
    return found


def find_step(specs: Specs) -> str | None:
    """The training step's leaf: an integer called `step`, the one nearest to the top."""
    named = [
        (len(path), name)
        for name, path in specs.paths.items()
        if table.strip_value(path)[-1:] == ("step",) and specs.leaves[name].shape == () and specs.leaves[name].dtype
    ]
    return min(named)[1] if named else None
