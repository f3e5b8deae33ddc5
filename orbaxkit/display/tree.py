"""A tree of leaves with totals per level, and its rows: long runs of alike siblings fold into one."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from orbaxkit.errors import TransformError, shown
from orbaxkit.paths import Segment, compile_pattern, format_path, is_index, natural_order, nearest
from orbaxkit.specs import LeafSpec, Specs

Sort = Literal["size"]
FOLDED_RUN = 3  # fewer siblings are shown one by one
DEEPEST = 100  # segments; the rest of a longer path is one row
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


@dataclass(slots=True)
class Node:
    """A level of the tree: totals of all leaves below, or of the one leaf that it is."""

    name: str
    children: "dict[Segment, Node]" = field(default_factory=dict)
    spec: LeafSpec | None = None
    leaves: int = 0
    parameters: int = 0
    nbytes: int = 0
    has_unknown_bytes: bool = False
    signature: int | None = None


@dataclass(slots=True)
class Row:
    """A node as one line; `times` is how many alike subtrees it stands for, its totals are those of all."""

    name: str
    node: Node
    level: int
    times: int
    leaves: int
    parameters: int
    nbytes: int
    has_unknown_bytes: bool
    children: "list[Row]" = field(default_factory=list)
    hidden: int = 0  # rows left out behind this one's children

    @property
    def is_collapsed(self) -> bool:
        """Whether there is something inside that is not shown."""
        return bool(self.node.children) and not self.children


def has_unknown_bytes(spec: LeafSpec) -> bool:
    """Whether a leaf has bytes, but how many is not on disk."""
    return spec.dtype is None and spec.kind not in ("string", "empty")


def selected(specs: Specs, pattern: "str | re.Pattern[str] | None") -> Specs:
    """The leaves that a pattern matches, all without one; a pattern that matches nothing is an error."""
    if pattern is None:
        return specs
    compiled = compile_pattern(pattern)
    names = [name for name, path in specs.paths.items() if compiled.match(path)]
    if not names:
        close = nearest(compiled.text, specs.leaves) or list(specs.leaves)[:1]
        hint = (
            f"names here are like {', '.join(map(repr, close))}; ** stands for any number of levels" if close else None
        )
        raise TransformError(f"the pattern {compiled.text!r} matches no leaf", hint=hint)
    return specs.subset(names)


def build(specs: Specs) -> Node:
    """The tree of these leaves, with totals."""
    root = Node("")
    pairs: list[tuple[Node, Node]] = []  # each node behind its parent, outer ones first
    for name, path in specs.paths.items():
        if len(path) > DEEPEST:
            path = (*path[: DEEPEST - 1], format_path(path[DEEPEST - 1 :]))
        node = root
        for segment in path:
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = Node(format_path((segment,)))
                pairs.append((node, child))
            node = child
        _count(node, specs.leaves[name])
    for parent, child in reversed(pairs):
        parent.leaves += child.leaves
        parent.parameters += child.parameters
        parent.nbytes += child.nbytes
        parent.has_unknown_bytes = parent.has_unknown_bytes or child.has_unknown_bytes
    return root


def _count(node: Node, spec: LeafSpec) -> None:
    node.spec, node.leaves = spec, 1
    node.parameters, node.nbytes = spec.parameters, spec.nbytes
    node.has_unknown_bytes = has_unknown_bytes(spec)


def expand(root: Node, *, depth: int | None, limit: int, sort: Sort | None = None) -> list[Row]:
    """The rows of a tree down to a depth; without one, level by level as long as no more than `limit` rows result."""
    top = _rows(root, 0, 1, sort)
    if depth is None and len(top) > limit:
        top[limit - 1].hidden = len(top) - limit
        top = top[:limit]
    count, waiting = len(top), deque(top)
    while waiting:
        row = waiting.popleft()
        if not row.node.children or (depth is not None and row.level + 1 >= depth):
            continue
        children = _rows(row.node, row.level + 1, row.times, sort)
        if depth is None and count + len(children) > limit:
            continue
        row.children = children
        count += len(children)
        waiting.extend(children)
    return top


def walk(rows: Iterable[Row]) -> Iterator[Row]:
    """Every row, outer ones first."""
    waiting = list(rows)[::-1]
    while waiting:
        row = waiting.pop()
        yield row
        waiting.extend(row.children[::-1])


def _rows(node: Node, level: int, times: int, sort: Sort | None) -> list[Row]:
    if node.spec is not None and not node.children:
        return [_row("(root)", [node], level, times)]
    groups = _runs(node) if len(node.children) >= FOLDED_RUN else [[key] for key in node.children]
    rows = [_row(_run_name(keys), [node.children[key] for key in keys], level, times) for keys in groups]
    return sorted(rows, key=lambda row: -row.nbytes) if sort == "size" else rows


def _row(name: str, nodes: list[Node], level: int, times: int) -> Row:
    """A row of a run; where the only thing below is one leaf (`kernel/value`), that leaf's row."""
    first, names = nodes[0], [shown(name)]
    while len(first.children) == 1 and (only := next(iter(first.children.values()))).spec is not None:
        first = only
        names.append(shown(only.name))
    return Row(
        name="/".join(names),
        node=first,
        level=level,
        times=times * len(nodes),
        leaves=times * sum(node.leaves for node in nodes),
        parameters=times * sum(node.parameters for node in nodes),
        nbytes=times * sum(node.nbytes for node in nodes),
        has_unknown_bytes=any(node.has_unknown_bytes for node in nodes),
    )


def _runs(node: Node) -> list[list[Segment]]:
    """The children's keys, alike ones with consecutive numbers together, each group where its first one stands."""
    parts = {key: found.groups() for key in node.children if (found := _NUMBERED.fullmatch(str(key)))}
    parts = {key: part for key, part in parts.items() if len(part[1]) <= 9}
    padded = {(head, tail, len(number)) for head, number, tail in parts.values() if not is_index(number)}
    numbered: dict[tuple[object, ...], dict[int, Segment]] = {}
    places: dict[Segment, tuple[object, ...]] = {}
    for key, (head, number, tail) in parts.items():
        width = len(number) if (head, tail, len(number)) in padded else 0  # 07 and 7 are never one run
        places[key] = head, tail, width, _signature(node.children[key])
        numbered.setdefault(places[key], {})[int(number)] = key
    groups: list[list[Segment]] = []
    done: set[Segment] = set()
    for key in natural_order(node.children):
        if key not in done:
            run = _run_around(int(parts[key][1]), numbered[places[key]]) if key in parts else []
            groups.append(run if len(run) >= FOLDED_RUN else [key])
            done.update(groups[-1])
    return groups


def _run_around(number: int, keys: dict[int, Segment]) -> list[Segment]:
    """The keys of the consecutive numbers around one, in order."""
    first = last = number
    while first - 1 in keys:
        first -= 1
    while last + 1 in keys:
        last += 1
    return [keys[i] for i in range(first, last + 1)]


def _run_name(keys: list[Segment]) -> str:
    """`layers_{0..47}`."""
    if len(keys) == 1:
        return format_path((keys[0],))
    found, last = _NUMBERED.fullmatch(str(keys[0])), _NUMBERED.fullmatch(str(keys[-1]))
    if not found or not last:
        return format_path((keys[0],))
    return f"{found[1]}{{{found[2]}..{last[2]}}}{found[3]}"


def _signature(node: Node) -> int:
    """Equal for subtrees of the same names, shapes, dtypes, kinds and shardings."""
    if node.signature is None:
        below = tuple((key, _signature(child)) for key, child in node.children.items())
        spec = node.spec
        own = spec and (spec.shape, spec.dtype, spec.kind, spec.key_impl, spec.empty, spec.sharding)
        node.signature = hash((below, own))
    return node.signature
