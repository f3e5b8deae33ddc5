"""Plans as text: expressions in the manner of numpy, and one line for many layers that are alike."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from orbaxkit.display.text import human_bytes
from orbaxkit.errors import shown
from orbaxkit.paths import KeyPath, format_path
from orbaxkit.planning.expressions import spec_of
from orbaxkit.planning.nodes import (
    Affine,
    Cast,
    Concat,
    Expr,
    Fill,
    Index,
    MergeLora,
    Read,
    Reshape,
    Slice,
    Stack,
    Transpose,
    Unreplicate,
    fold,
)
from orbaxkit.planning.plan import Plan
from orbaxkit.specs import LeafSpec

_NUMBER = re.compile(r"\d+")
_LONG = 8  # arguments of a stack before they are cut


def expr_text(expr: Expr) -> str:
    """`transpose(params/layers/w[3], 1, 0)`."""
    return fold([expr], _text)[0]


def _text(node: Expr, xs: tuple[str, ...]) -> str:
    match node:
        case Read(name, _, _, source):
            return (name or "(root)") + (f" of {source.label}" if source is not None else "")
        case Fill(value):
            return repr(value)
        case Index(_, axis, i):
            return _subscript(node.x, xs[0], axis, str(i))
        case Slice(_, axis, start, stop):
            return _subscript(node.x, xs[0], axis, f"{start}:{stop}")
        case Unreplicate(_, axis):
            return _subscript(node.x, xs[0], axis, "any")
        case Stack(_, axis) | Concat(_, axis):
            return f"{type(node).__name__.lower()}({_many(xs)}, axis={axis})"
        case Transpose(_, perm):
            return f"transpose({xs[0]}, {', '.join(map(str, perm))})"
        case Reshape(_, shape):
            return f"reshape({xs[0]}, {', '.join(map(str, shape))})"
        case Cast(_, to):
            return f"{to.name}({xs[0]})"
        case Affine(_, scale, shift):
            return f"({xs[0]} * {scale:g} + {shift:g})"
        case MergeLora(_, _, _, scale, form):
            return f"({xs[0]} + {scale:g} * {xs[1]} @ {xs[2]}{' summed over heads' if form == 'summed_heads' else ''})"
    raise TypeError(f"{type(node).__name__} is not an expression")


def _subscript(x: Expr, text: str, axis: int, what: str) -> str:
    return f"{text}[{', '.join([':'] * axis + [what])}]"


def _many(xs: Sequence[str]) -> str:
    if len(xs) > 2:
        folded = _fold_numbers(xs)
        if folded is not None:
            return folded
    return ", ".join(xs) if len(xs) <= _LONG else ", ".join([*xs[:3], f"… {len(xs) - 4:,} more …", xs[-1]])


def plan_text(plan: Plan, most: int) -> str:
    """See `Plan.describe`."""
    kept = {
        n for n, o in plan.outputs.items() if isinstance(o.expr, Read) and o.expr.source is None and o.expr.name == n
    }
    everything = {**plan.source.paths, **{name: output.path for name, output in plan.outputs.items()}}
    changed = [name for name in plan.outputs if name not in kept]
    sections = [
        _folded_subtrees("=", [n for n in plan.outputs if n in kept], plan.specs.leaves, everything),
        _changed(plan, changed),
        _folded_subtrees("-", list(plan.dropped), plan.source.leaves, everything),
    ]
    return "\n".join([_header(plan), *(line for lines in sections for line in _at_most(lines, most))])


def _header(plan: Plan) -> str:
    stored = sum(
        spec.nbytes if spec.stored_bytes is None else spec.stored_bytes for spec in plan.source.leaves.values()
    )
    out = sum(spec.nbytes for spec in plan.specs.leaves.values())
    return (
        f"plan: {len(plan.source):,} leaves -> {len(plan.outputs):,}, "
        f"reads {human_bytes(plan.read_bytes)} of {human_bytes(stored)}, makes {human_bytes(out)}"
    )


def _folded_subtrees(
    sign: str, names: list[str], specs: Mapping[str, LeafSpec], everything: dict[str, KeyPath]
) -> list[str]:
    """One line for each outermost subtree that lies wholly within `names`."""
    chosen = set(names)
    total, inside = Counter[KeyPath](), Counter[KeyPath]()
    for name, path in everything.items():
        prefixes = [path[:k] for k in range(1, len(path))]
        total.update(prefixes)
        if name in chosen:
            inside.update(prefixes)
    groups: dict[str, list[str]] = {}
    for name in names:
        path = everything[name]
        whole = next((path[:k] for k in range(1, len(path)) if inside[path[:k]] == total[path[:k]] > 1), None)
        groups.setdefault(name if whole is None else f"{format_path(whole)}/**", []).append(name)
    rows: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for text, members in groups.items():
        what = str(specs[members[0]]) if len(members) == 1 else f"{len(members):,} leaves"
        rows.setdefault((_NUMBER.sub("#", text), what), []).append((text, sum(specs[name].nbytes for name in members)))
    return [_row(sign, what, found) for (_, what), found in rows.items()]


def _row(sign: str, what: str, found: list[tuple[str, int]]) -> str:
    text = _fold_numbers([text for text, _ in found])
    times = f"  x{len(found):,}" if len(found) > 1 else ""
    return f"{sign} {shown(text or '(root)')}  {what}{times}  {human_bytes(sum(size for _, size in found))}"


def _changed(plan: Plan, names: list[str]) -> list[str]:
    """One line for all outputs that differ in numbers only."""
    folded: dict[tuple[str, str, str, str], list[tuple[str, str]]] = {}
    for name in names:
        expr = plan.outputs[name].expr
        text = expr_text(expr)
        sign = "+" if expr.height == 0 and isinstance(expr, Fill) else "~"
        key = (sign, _NUMBER.sub("#", name), _NUMBER.sub("#", text), str(spec_of(expr)))
        folded.setdefault(key, []).append((name, text))
    lines = []
    for (sign, _, _, spec), members in folded.items():
        for path, text, count in _runs(members):
            size = human_bytes(plan.specs[members[0][0]].nbytes * count)
            times = f"  x{count:,}" if count > 1 else ""
            lines.append(f"{sign} {shown(path or '(root)')} = {shown(text)}  {spec}{times}  {size}")
    return lines


def _runs(members: list[tuple[str, str]]) -> Iterable[tuple[str, str, int]]:
    """Outputs with the same text but for numbers: folded where the numbers run, else one by one."""
    if len(members) > 1:
        path, text = _fold_numbers([m[0] for m in members]), _fold_numbers([m[1] for m in members])
        if path is not None and text is not None:
            return [(path, text, len(members))]
    return [(*member, 1) for member in members]


def _fold_numbers(texts: Sequence[str]) -> str | None:
    """`a_0/w, a_1/w, …` as `a_{0..95}/w`; None where the texts differ in more than numbers."""
    skeletons = {_NUMBER.sub("#", text) for text in texts}
    if len(skeletons) != 1:
        return None
    columns = list(zip(*(_NUMBER.findall(text) for text in texts), strict=True))
    parts = iter(_span(column) for column in columns)
    return re.sub("#", lambda _: next(parts), skeletons.pop())


def _span(column: Sequence[str]) -> str:
    """`7`, `{0..95}`, `{0,4..6,9}`."""
    if len(set(column)) == 1:
        return column[0]
    runs: list[list[int]] = []
    for number in sorted({int(text) for text in column}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{low}..{high}" if low < high else str(low) for low, high in runs]
    return "{" + ",".join(parts if len(parts) <= 5 else [*parts[:3], "…", parts[-1]]) + "}"


def _at_most(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"  … and {len(lines) - most:,} more lines like these"]
