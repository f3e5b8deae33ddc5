"""Expression nodes: what an output is, in terms of the leaves that are read.

Nodes are immutable values. They know their shape and element when they are made, hash in constant time and compare
without recursion, so that trees with many thousands of outputs stay cheap. Build them with `planning.expressions`,
whose constructors simplify; the classes here only hold.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from orbaxkit.specs import Kind, LeafSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Element:
    """What one element of an array is. `words` is the shape of a PRNG key's data: `(2,)` for threefry."""

    dtype: np.dtype | None
    kind: Kind = "array"
    key_impl: str | None = None
    words: tuple[int, ...] = ()

    @staticmethod
    def of(spec: LeafSpec) -> "Element":
        """The element of a leaf on disk."""
        words = spec.data_shape[len(spec.shape) :] if spec.kind == "key" else ()
        return _element(spec.dtype, spec.kind, spec.key_impl, words)

    @property
    def is_numeric(self) -> bool:
        """Whether it can be cast and computed with: not strings, empty nodes or keys."""
        return self.kind in ("array", "numpy", "scalar")

    @property
    def has_layout(self) -> bool:
        """Whether arrays of it can be cut, joined and transposed."""
        return self.kind not in ("string", "empty")

    def with_dtype(self, dtype: np.dtype) -> "Element":
        """After a cast, which makes an array of a Python scalar."""
        return replace(self, dtype=dtype, kind="array" if self.kind == "scalar" else self.kind)


# A tree has many leaves and few kinds of elements; that one object stands for each makes comparing them cheap.
_element = lru_cache(maxsize=4096)(Element)


class Constant:
    """An array given by the caller. Arrays on the host compare by their bits, those on devices by identity."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        if self.array is other.array:
            return True
        arrays = (self.array, other.array)
        if not all(isinstance(a, np.ndarray) for a in arrays) or self._facts != other._facts:
            return False
        return arrays[0].tobytes() == arrays[1].tobytes()

    @property
    def _facts(self) -> tuple[tuple[int, ...], Any]:
        return tuple(self.array.shape), self.array.dtype

    def __hash__(self) -> int:
        return hash(self._facts)

    def __repr__(self) -> str:
        return f"array({self.array.dtype}[{', '.join(map(str, self.array.shape))}])"


@dataclass(frozen=True, eq=False)
class Foreign:
    """Another source to read from (`formats.Source`), compared by identity."""

    source: Any
    label: str = "another checkpoint"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and self.source is other.source

    def __hash__(self) -> int:
        return id(self.source)


@dataclass_transform(frozen_default=True, eq_default=False)
def _node(cls: type[T]) -> type[T]:
    """A frozen dataclass that is sealed when made: its shape, element, height and hash are computed once."""
    cls.__eq__ = _equal  # type: ignore[method-assign]
    cls.__hash__ = _hash  # type: ignore[method-assign]
    cls.dtype = property(_dtype)  # type: ignore[attr-defined]
    cls.kind = property(_kind)  # type: ignore[attr-defined]
    return dataclass(frozen=True, eq=False, repr=True)(cls)


def _dtype(self: "Expr") -> np.dtype | None:
    return self.element.dtype


def _kind(self: "Expr") -> Kind:
    return self.element.kind


def _seal(node: "Expr", shape: tuple[int, ...], element: Element, own: tuple, xs: "tuple[Expr, ...]" = ()) -> None:
    """Complete a node: `own` is what tells it from others of its class with this shape, this element and these `xs`."""
    found = node.__dict__
    found["shape"], found["element"], found["children"], found["own"] = shape, element, xs, own
    if xs:
        found["height"] = 1 + max([x.height for x in xs])
        found["_hash"] = hash((type(node).__name__, shape, own, tuple([x._hash for x in xs])))
    else:
        found["height"] = 0
        found["_hash"] = hash((type(node).__name__, shape, own))


def _hash(self: "Expr") -> int:
    return self._hash


def _equal(self: "Expr", other: object) -> bool:
    if type(self) is not type(other):
        return False
    pending: list[tuple[Any, Any]] = [(self, other)]
    seen: set[tuple[int, int]] = set()
    while pending:
        a, b = pending.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        if type(a) is not type(b) or a._hash != b._hash or _facts(a) != _facts(b):
            return False
        seen.add((id(a), id(b)))
        pending.extend(zip(a.children, b.children, strict=True))
    return True


def _facts(node: "Expr") -> tuple:
    return node.shape, node.element, node.own, len(node.children)


@_node
class Read:
    """A whole leaf of the plan's source, or of another one (`source`)."""

    name: str
    shape: tuple[int, ...]
    element: Element
    source: Foreign | None = None

    def __post_init__(self) -> None:
        _seal(self, self.shape, self.element, (self.name, self.source))


@_node
class Fill:
    """A constant: a number that fills the shape, or a whole array."""

    value: int | float | complex | bool | str | Constant
    shape: tuple[int, ...]
    element: Element

    def __post_init__(self) -> None:
        value = self.value if isinstance(self.value, Constant) else (type(self.value), repr(self.value))  # -0.0, NaN
        _seal(self, self.shape, self.element, (value,))


@_node
class Index:
    """One position of an axis; the axis goes."""

    x: "Expr"
    axis: int
    i: int

    def __post_init__(self) -> None:
        shape = self.x.shape[: self.axis] + self.x.shape[self.axis + 1 :]
        _seal(self, shape, self.x.element, (self.axis, self.i), (self.x,))


@_node
class Slice:
    """Positions `start` to `stop` of an axis."""

    x: "Expr"
    axis: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        shape = (*self.x.shape[: self.axis], self.stop - self.start, *self.x.shape[self.axis + 1 :])
        _seal(self, shape, self.x.element, (self.axis, self.start, self.stop), (self.x,))


@_node
class Stack:
    """Arrays of one shape along a new axis."""

    xs: "tuple[Expr, ...]"
    axis: int

    def __post_init__(self) -> None:
        shape = (*self.xs[0].shape[: self.axis], len(self.xs), *self.xs[0].shape[self.axis :])
        _seal(self, shape, join_elements(self.xs), (self.axis,), self.xs)


@_node
class Concat:
    """Arrays joined along an axis they have."""

    xs: "tuple[Expr, ...]"
    axis: int

    def __post_init__(self) -> None:
        first, total = self.xs[0].shape, sum([x.shape[self.axis] for x in self.xs])
        shape = (*first[: self.axis], total, *first[self.axis + 1 :])
        _seal(self, shape, join_elements(self.xs), (self.axis,), self.xs)


@_node
class Transpose:
    """Axis `k` of the result is axis `perm[k]` of `x`."""

    x: "Expr"
    perm: tuple[int, ...]

    def __post_init__(self) -> None:
        _seal(self, tuple([self.x.shape[p] for p in self.perm]), self.x.element, (self.perm,), (self.x,))


@_node
class Reshape:
    """The same elements in C order in another shape."""

    x: "Expr"
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _seal(self, self.shape, self.x.element, (), (self.x,))


@_node
class Cast:
    """The same values in another dtype: rounds to floats, checks that values fit into integers."""

    x: "Expr"
    to: np.dtype

    def __post_init__(self) -> None:
        _seal(self, self.x.shape, self.x.element.with_dtype(self.to), (self.to,), (self.x,))


@_node
class Affine:
    """`x * scale + shift`, computed in float32 or wider and rounded to the dtype of `x`."""

    x: "Expr"
    scale: float
    shift: float

    def __post_init__(self) -> None:
        _seal(self, self.x.shape, self.x.element, (self.scale, self.shift), (self.x,))


@_node
class MergeLora:
    """`w + scale * dW`, where `dW` is made of `a` and `b` as `form` says (`planning.host.lora_delta`)."""

    w: "Expr"
    a: "Expr"
    b: "Expr"
    scale: float
    form: str = "product"

    def __post_init__(self) -> None:
        _seal(self, self.w.shape, self.w.element, (self.scale, self.form), (self.w, self.a, self.b))


@_node
class Unreplicate:
    """Position 0 of an axis along which every position must hold the same bits; the axis goes."""

    x: "Expr"
    axis: int

    def __post_init__(self) -> None:
        shape = self.x.shape[: self.axis] + self.x.shape[self.axis + 1 :]
        _seal(self, shape, self.x.element, (self.axis,), (self.x,))


Expr = Any  # one of the node classes: Read | Fill | Index | … (a union of decorated classes says nothing to a checker)
NODES = {
    cls.__name__: cls
    for cls in (Read, Fill, Index, Slice, Stack, Concat, Transpose, Reshape, Cast, Affine, MergeLora, Unreplicate)
}


def join_elements(xs: Iterable[Expr]) -> Element:
    """The element of an array made of these: theirs where they agree; scalars and mixed kinds make an array."""
    xs = tuple(xs)
    first = xs[0].element
    kinds = {x.element.kind for x in xs}
    return first if len(kinds) == 1 and first.kind != "scalar" else replace(first, kind="array")


def fold(roots: Iterable[Expr], visit: Callable[[Expr, tuple[T, ...]], T], done: dict[int, T] | None = None) -> list[T]:
    """Compute bottom-up, each shared node once: `visit(node, results of its children)`; the roots' results in order.

    `done` holds results by `id(node)`; hand the same dict to several calls to share it while the nodes live.
    """
    roots = list(roots)
    done = {} if done is None else done
    pending = list(reversed(roots))
    while pending:
        node = pending.pop()
        if id(node) in done:
            continue
        missing = [x for x in node.children if id(x) not in done]
        if missing:
            pending.append(node)
            pending.extend(reversed(missing))
        else:
            done[id(node)] = visit(node, tuple([done[id(x)] for x in node.children]))
    return [done[id(root)] for root in roots]


def reads_of(*exprs: Expr) -> list[Read]:
    """The distinct leaves that expressions read, in order."""
    if len(exprs) == 1 and (read := _only_read(exprs[0])):
        return [read]
    found: dict[Read, None] = {}
    fold(exprs, lambda node, _: found.setdefault(node) if isinstance(node, Read) else None)
    return list(found)


def _only_read(expr: Expr) -> Read | None:
    """The leaf at the end of a chain of operations on one array."""
    while len(expr.children) == 1:
        expr = expr.children[0]
    return expr if isinstance(expr, Read) else None
