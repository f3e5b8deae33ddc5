"""A plan: what comes out, as expressions over what is read. Everything else about it is derived."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from orbaxkit.errors import TransformError
from orbaxkit.paths import KeyPath
from orbaxkit.planning import expressions, regions
from orbaxkit.planning.nodes import Expr, Foreign, Read, reads_of
from orbaxkit.planning.regions import Region
from orbaxkit.specs import LeafSpec, Specs


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf that comes out, under its typed path."""

    path: KeyPath
    expr: Expr


@dataclass(frozen=True, repr=False)
class Plan:
    """What to make of a source's leaves: `outputs` by the text of their paths.

    Strings and empty nodes pass through as reads. `containers` says which inner nodes of the outputs are tuples, where
    the source knows.

    >>> plan = ok.plan("runs/pi0", ok.select("params/head/*"), ok.transpose("params/head/kernel"))
    >>> plan.specs["params/head/kernel"].shape, plan.inverse().specs["params/head/kernel"].shape
    ((2, 8), (8, 2))
    """

    source: Specs
    outputs: Mapping[str, Output]
    containers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def identity(specs: Specs) -> "Plan":
        """Every leaf as it is."""
        paths = specs.paths
        outputs = {name: Output(paths[name], expressions.read(name, spec)) for name, spec in specs.leaves.items()}
        return Plan(specs, outputs, specs.containers)

    @property
    def is_identity(self) -> bool:
        """Whether every leaf of the source comes out as it is, under its own name."""
        names = [
            o.expr.name if isinstance(o.expr, Read) and o.expr.source is None else None for o in self.outputs.values()
        ]
        return names == list(self.outputs) == list(self.source)

    def with_outputs(self, outputs: Mapping[str, Output]) -> "Plan":
        """The same source with other outputs."""
        return replace(self, outputs=outputs)

    @cached_property
    def specs(self) -> Specs:
        """What will come out; a leaf that only passes through keeps what is known of it on disk."""
        leaves = {name: self._spec(output.expr) for name, output in self.outputs.items()}
        return Specs(leaves, {name: output.path for name, output in self.outputs.items()}, self.containers)

    def _spec(self, expr: Expr) -> LeafSpec:
        if not isinstance(expr, Read):
            return expressions.spec_of(expr)
        return self.source[expr.name] if expr.source is None else expr.source.source.specs[expr.name]

    @cached_property
    def _needed(self) -> dict[tuple[Foreign | None, str], list[Region]]:
        return regions.needed(output.expr for output in self.outputs.values())

    @cached_property
    def reads(self) -> dict[str, list[Region]]:
        """The regions of the source's leaves that are needed, in the coordinates of the stored arrays."""
        return {name: found for (source, name), found in self._needed.items() if source is None}

    @cached_property
    def foreign_reads(self) -> dict[tuple[Foreign, str], list[Region]]:
        """The same for leaves that fills take from other sources."""
        return {(source, name): found for (source, name), found in self._needed.items() if source is not None}

    @property
    def read_bytes(self) -> int:
        """The stored bytes that will be read: those of every chunk that a region touches."""
        own = sum(regions.touched_bytes(self.source.leaves[name], found) for name, found in self.reads.items())
        return own + sum(
            regions.touched_bytes(source.source.specs[name], found)
            for (source, name), found in self.foreign_reads.items()
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The source's leaves that nothing uses."""
        return tuple([name for name in self.source if name not in self.reads])

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Outputs connected by leaves that they share: what has to be in memory together."""
        parent: dict[Any, Any] = {}

        def root(key: Any) -> Any:
            while parent.setdefault(key, key) != key:
                parent[key] = key = parent[parent[key]]
            return key

        for name, output in self.outputs.items():
            for read in reads_of(output.expr):
                parent[root(("read", read.source, read.name))] = root(name)
        members: dict[Any, list[str]] = {}
        for name in self.outputs:
            members.setdefault(root(name), []).append(name)
        return tuple([tuple(names) for names in members.values()])

    def inverse(self) -> "Plan":
        """The plan from what comes out back to the source's leaves.

        Exact: `plan.then(plan.inverse())` gives every leaf that the plan reads as it was. Leaves that nothing reads
        (`dropped`) are simply not made again.

        Raises NotInvertibleError: leaves that are read in part only, rounded, scaled or merged; all are named.
        """
        from orbaxkit.planning.inversion import invert

        return invert(self)

    def as_function(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """One pure function from the source's arrays to the outputs, both by path, for use inside `jax.jit`.

        Strings and empty nodes are left out. Bit for bit what an executor makes, for layout operations and casts.

        Raises TransformError: casts or replicas whose values must be checked, and fills from files, which no traced
        function can do; when called, arrays that are missing or not those of the plan.
        """
        from orbaxkit.planning.traced import as_function

        return as_function(self)

    def describe(self, *, most: int = 40) -> str:
        """Lines for people: `=` kept, `~` changed with its expression, `+` filled, `-` dropped, and bytes.

        Layers that are alike fold into one line; at most `most` lines of each kind are shown.
        """
        from orbaxkit.planning.printing import plan_text

        return plan_text(self, most)

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        from orbaxkit.display.html import plan_to_html

        return plan_to_html(self.describe(most=1000))

    def __repr__(self) -> str:
        return f"<Plan: {len(self.source):,} leaves -> {len(self.outputs):,}>"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data. Raises TransformError: it holds arrays or other sources, all named."""
        from orbaxkit.planning.wire import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Plan":
        """What `to_json` wrote. Raises TransformError: it is not a plan."""
        from orbaxkit.planning.wire import plan_from_json

        return plan_from_json(data)

    def then(self, other: "Plan") -> "Plan":
        """This plan followed by one whose source is what this one makes."""
        return compose(self, other)


def compose(first: Plan, second: Plan) -> Plan:
    """One plan that does what two do in turn; the second reads the first one's outputs by name."""

    wanted = reads_of(*[output.expr for output in second.outputs.values()])
    lacking = dict.fromkeys(read.name for read in wanted if read.source is None and read.name not in first.outputs)
    if lacking:
        problems = [(name, "is read by the second plan and not made by the first") for name in lacking]
        raise TransformError("these plans do not follow each other", leaves=problems)

    def replacement(read: Read) -> Expr:
        if read.source is not None:
            return read
        expr = first.outputs[read.name].expr
        return read if expr == read else expr  # what only passed through needs no new expressions above it

    exprs = expressions.substitute([output.expr for output in second.outputs.values()], replacement)
    outputs = {
        name: Output(output.path, expr) for (name, output), expr in zip(second.outputs.items(), exprs, strict=True)
    }
    return Plan(first.source, outputs, second.containers)


Transform = Callable[[Plan], Plan]


def make_plan(specs: Specs, *transforms: Transform) -> Plan:
    """Plan transforms, in order, on what is known of a source.

    What a transform does to params it does to their optimizer slots too (`planning.mirrors`).
    """
    plan = Plan.identity(specs)
    from orbaxkit.planning.mirrors import apply_transform

    for transform in transforms:
        if not callable(transform):
            raise TransformError(f"{transform!r} is no transform", hint="select, drop, rename…: ok.select('params/**')")
        plan = apply_transform(transform, plan)
    return plan
