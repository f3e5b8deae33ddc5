"""Optimizer states found in a tree by their field names, and which of their fields mirror the params."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orbaxkit.errors import shown
from orbaxkit.paths import KeyPath, Segment, format_path, is_index
from orbaxkit.specs import Specs
from orbaxkit.states import STATES, StateClass, StateField, candidates


@dataclass(frozen=True)
class Slot:
    """One optax state in a tree: the classes it may be (the default first) and each field's leaves.

    `leaves` has the non-empty leaves of every field that is no inner state; `mirrors` those of the fields that follow
    the params leaf by leaf, so `path/field/rest` belongs to the param `rest`.
    """

    path: str
    key_path: KeyPath
    candidates: tuple[StateClass, ...]
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def default(self) -> StateClass:
        """The class to take where nothing else settles it."""
        return self.candidates[0]

    @property
    def is_ambiguous(self) -> bool:
        """Whether several classes fit the fields and the shapes."""
        return len(self.candidates) > 1

    def param_of(self, specs: Specs, name: str) -> KeyPath:
        """The path within the params of what one of our mirrors' leaves belongs to."""
        return specs.paths[name][len(self.key_path) + 1 :]


_OPTIMIZER = re.compile(r"(.*_)?(opt|optim|optimizer|tx|optax)(_?states?)?", re.IGNORECASE)
# What averaged copies of the params are called, outside optimizer states.
EMA_NAMES = frozenset({"ema_params", "params_ema", "ema", "ema_state"})
_ALL_FIELDS = frozenset(name for state in STATES for name in state.fields)


@dataclass(slots=True)
class _Found:
    """A node that may be a state: which plausible node is around it, and whether it lies in an inner state of that."""

    slot: Slot
    parent: int | None
    is_inner: bool
    is_sure: bool


def find_slots(specs: Specs) -> tuple[Slot, ...]:
    """Every optax state of a tree that its field names give away, outer states before inner ones.

    `{count, mu, nu}` is recognised anywhere; what could also be a param's name (`{trace}`, `{count}`) only within
    something named like an optimizer, beside a recognised state in one chain, or inside or around one.
    """
    found: list[_Found] = []
    _search(_tree(specs), (), specs, found, None, False)
    for node in reversed(found):
        if node.is_sure and node.is_inner and node.parent is not None:
            found[node.parent].is_sure = True
    roots = {_chain_root(node.slot.key_path) for node in found if node.is_sure}
    for node in found:
        node.is_sure = node.is_sure or _chain_root(node.slot.key_path) in roots
        if node.parent is not None and found[node.parent].is_sure:
            node.is_sure = node.is_inner
    return tuple(node.slot for node in found if node.is_sure)


def _tree(specs: Specs) -> dict[str, Any]:
    """Nested dicts by segment text; a leaf is its name."""
    root: dict[str, Any] = {}
    for name, path in specs.paths.items():
        node = root
        for segment in path[:-1]:
            node = node.setdefault(str(segment), {})
        if path:
            node[str(path[-1])] = name
    return root


def _search(
    node: dict[str, Any], path: KeyPath, specs: Specs, found: list[_Found], parent: int | None, is_inner: bool
) -> None:
    slot = _as_slot(node, path, specs) if node and node.keys() <= _ALL_FIELDS else None
    is_sure = slot is not None and (_is_telling(slot) or _within_optimizer(path))
    if slot:
        found.append(_Found(slot, parent, is_inner, is_sure))
        parent = len(found) - 1
    for key, child in node.items():
        if slot:
            is_inner = slot.default.fields[key].role == "inner state"
        if isinstance(child, dict) and (is_inner or not is_sure):
            _search(child, (*path, key), specs, found, parent, is_inner)


def _as_slot(node: dict[str, Any], path: KeyPath, specs: Specs) -> Slot | None:
    possible = candidates(frozenset(node))
    if not possible:
        return None
    names = {key: tuple(_names(child, specs)) for key, child in node.items()}
    fits = tuple(state for state in possible if _allows(state, names, len(path) + 1, specs)) or possible
    known = fits[0].fields
    leaves = {key: names[key] for key in known if key in names and known[key].role != "inner state"}
    mirrors = {key: leaves[key] for key in leaves if leaves[key] and _is_mirror(known[key], node[key])}
    typed = _typed(path, names, specs)
    return Slot(format_path(typed), typed, fits, leaves, mirrors)


def _typed(path: KeyPath, names: Mapping[str, tuple[str, ...]], specs: Specs) -> KeyPath:
    """The node's path with the segment types that its leaves have."""
    first = next((leaf for leaves in names.values() for leaf in leaves), None)
    return path if first is None else specs.paths[first][: len(path)]


def _names(child: Any, specs: Specs) -> Iterator[str]:
    if isinstance(child, dict):
        for inner in child.values():
            yield from _names(inner, specs)
    elif specs.leaves[child].kind != "empty":
        yield child


def _is_mirror(known: StateField, child: Any) -> bool:
    return known.layout not in ("none", "other") and isinstance(child, dict)


def _allows(state: StateClass, names: Mapping[str, tuple[str, ...]], depth: int, specs: Specs) -> bool:
    """Whether the shapes fit: fields of the params' shapes agree with each other, numbers per leaf are numbers."""
    shapes: dict[str, list[dict[KeyPath, tuple[int, ...]]]] = {"params": [], "per leaf": [], "per axis": []}
    for key, known in state.fields.items():
        if known.layout in shapes and names.get(key):
            shapes[known.layout].append({specs.paths[n][depth:]: specs.leaves[n].shape for n in names[key]})
    alike = shapes["params"]
    is_number = all(shape in ((), (1,)) for one in shapes["per leaf"] for shape in one.values())
    is_per_axis = all(one.keys().isdisjoint(other) for one in shapes["per axis"] for other in alike)
    return is_number and is_per_axis and all(one == alike[0] for one in alike)


def _is_telling(slot: Slot) -> bool:
    """Whether the fields alone say that this is a state: a count beside moments, or beside much else."""
    roles = [slot.default.fields[name].role for name in slot.leaves]
    is_rich = bool(slot.mirrors) or len(slot.default.fields) > 2
    return is_rich and "count" in roles and not _within_params(slot.key_path)


def _within_params(path: KeyPath) -> bool:
    return "params" in path and not _within_optimizer(path)


def _within_optimizer(path: KeyPath) -> bool:
    return any(is_optimizer_name(segment) for segment in path)


def is_optimizer_name(segment: Segment) -> bool:
    """Whether a key is called like an optimizer or its state."""
    return isinstance(segment, str) and _OPTIMIZER.fullmatch(segment) is not None


def _chain_root(path: KeyPath) -> KeyPath:
    while path and is_index(str(path[-1])):
        path = path[:-1]
    return path


def mirrored_root(specs: Specs, slots: Iterable[Slot]) -> KeyPath | None:
    """The subtree that holds the params which the slots mirror: the one with most of the mirrored paths, or None."""
    slots = tuple(slots)
    wanted = {path for slot in slots for path in mirrored_params(specs, slot)}
    if not wanted:
        return None
    inside = {slot.key_path for slot in slots}
    outside = {
        strip_value(path) for path in specs.paths.values() if not any(path[:i] in inside for i in range(len(path)))
    }
    probe = max(wanted, key=len)
    starts = {path[: -len(probe)] for path in outside if path[-len(probe) :] == probe}
    few = sorted(starts, key=lambda start: (start[-1:] != ("params",), len(start)))[:16]
    hits = {start: sum((*start, *path) in outside for path in wanted) for start in few}
    best = max(few, key=lambda start: hits[start], default=None)
    return best if best is not None and 2 * hits[best] >= len(wanted) else None


def mirrored_params(specs: Specs, slot: Slot) -> tuple[KeyPath, ...]:
    """The paths, within the params, of those that the slot has moments (sums, copies) for; without NNX's `value`."""
    main = _main_mirrors(slot)
    first = next(iter(main), None)
    return () if first is None else tuple(strip_value(slot.param_of(specs, name)) for name in main[first])


def strip_value(path: KeyPath) -> KeyPath:
    """Without the `value` that ends the paths of an NNX state."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


_HELD = {"moment": "moments for", "accumulator": "sums for", "params-like": "copies of", "scalar": "numbers for"}


def _main_mirrors(slot: Slot) -> dict[str, tuple[str, ...]]:
    """The mirrors of one role, the most telling one that there is, those of the params' shapes first."""
    fields = slot.default.fields
    for role in _HELD:
        found = {name: leaves for name, leaves in slot.mirrors.items() if fields[name].role == role}
        if found:
            return dict(sorted(found.items(), key=lambda item: fields[item[0]].layout != "params"))
    return {}


def describe_slots(specs: Specs) -> list[str]:
    """One phrase per optimizer state, and one where the params are not there; none for a tree without an optimizer."""
    slots = find_slots(specs)
    params = mirrored_root(specs, slots)
    lines = [_describe(slot, specs, _count_params(specs, params)) for slot in slots]
    has_mirrors = any(slot.mirrors for slot in slots)
    return [*lines, "no params in this item"] if has_mirrors and params is None else lines


def _count_params(specs: Specs, params: KeyPath | None) -> int | None:
    if params is None or params[-1:] != ("params",):  # elsewhere, statistics may lie among the params
        return None
    return sum(specs.leaves[name].parameters > 0 for name, path in specs.paths.items() if path[: len(params)] == params)


def _describe(slot: Slot, specs: Specs, params: int | None) -> str:
    fields = [n for n, known in slot.default.fields.items() if n in slot.leaves or known.role == "inner state"]
    text = f"{shown(slot.path) or '(root)'} {slot.default.label}-like ({', '.join(fields)})"
    main = _main_mirrors(slot)
    if not main:
        return text
    held = _HELD[slot.default.fields[next(iter(main))].role]
    count = len(mirrored_params(specs, slot))
    of = "" if params is None or params <= count else f" of {params:,}"
    sizes = [sum(specs.leaves[name].size for name in names) for names in main.values()]
    if len(set(sizes)) == 1:
        values = f"{sizes[0]:,} values{' each' * (len(sizes) > 1)}"
    else:
        values = f"{' + '.join(f'{size:,}' for size in sizes)} values"
    return f"{text}: {held} {count:,}{of} param{'s' * (count != 1 or bool(of))}, {values}"
