"""Where the params are in a tree, from its paths alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orbaxkit.arguments import one_of
from orbaxkit.errors import CheckpointError
from orbaxkit.paths import KeyPath, Segment, format_path
from orbaxkit.slots import EMA_NAMES, find_slots, is_optimizer_name
from orbaxkit.specs import Specs

Which = Literal["ema", "raw"]

_BOOKKEEPING = {"step", "rng", "rngs", "key", "metrics", "epoch", "dropout_rng", "dropout_key"}


@dataclass(frozen=True)
class FoundParams:
    """A subtree that holds params, whether it is an average of them, and why it was taken for params."""

    path: KeyPath
    is_ema: bool
    why: str

    def __str__(self) -> str:
        return f"{format_path(self.path) or '(the whole tree)'}: {self.why}"


def find_params(specs: Specs, which: Which | None = None) -> FoundParams:
    """The one subtree that holds the params.

    Looks for nodes named `params` outside optimizer states (`params/params` is followed down), then for the one subtree
    beside an optimizer or a step, then takes a tree of nothing else whole. Raises CheckpointError with the candidates
    where that leaves none or several; `which` settles an average against the live params.
    """
    one_of("which", which, (None, "ema", "raw"), CheckpointError)
    slots = {slot.key_path for slot in find_slots(specs)}
    paths = [specs.paths[name] for name, spec in specs.items() if spec.kind != "empty"]
    candidates = _named_params(paths, slots) or _beside_the_rest(paths, slots)
    if which is not None:
        candidates = [found for found in candidates if found.is_ema == (which == "ema")]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        tops = list(dict.fromkeys(format_path(path[:1]) for path in paths))
        what = "no params in this checkpoint" if which is None else f"no {which} params in this checkpoint"
        raise CheckpointError(
            what + f"; at its top: {', '.join(tops[:8]) or 'nothing'}",
            hint='name the subtree yourself: ok.restore(path, ok.select("…/**"))',
        )
    both = {found.is_ema for found in candidates} == {True, False}
    raise CheckpointError(
        "several subtrees could be the params",
        leaves=[(format_path(found.path), found.why) for found in candidates],
        hint='say which="ema" or which="raw"' if both else 'name one: ok.restore(path, ok.select("…/**")), or item=…',
    )


def _is_optimizer(path: KeyPath, slots: set[KeyPath]) -> bool:
    """Whether a node is an optimizer's state, by its name or by its fields."""
    return is_optimizer_name(path[-1]) or path in slots


def _named_params(paths: list[KeyPath], slots: set[KeyPath]) -> list[FoundParams]:
    """Nodes called params or ema_params…, outside optimizers and outside one another."""
    found: dict[KeyPath, bool] = {}
    for path in paths:
        for node in (path[:depth] for depth in range(1, len(path))):
            if _is_optimizer(node, slots):
                break
            if node[-1] == "params" or node[-1] in EMA_NAMES:
                found[node] = node[-1] in EMA_NAMES
                break
    return [_named(path, is_ema, paths, ("train_state", "params") in found) for path, is_ema in found.items()]


def _named(path: KeyPath, is_ema: bool, paths: list[KeyPath], in_train_state: bool) -> FoundParams:
    at = _descend(path, paths)
    if path == ("params",) and in_train_state:  # as openpi saves a run with an average
        return FoundParams(at, True, "the params item beside a train state with its own: the averaged (EMA) copy")
    return FoundParams(at, is_ema, "averaged (EMA) params, by name" if is_ema else "params, by name")


def _descend(path: KeyPath, paths: list[KeyPath]) -> KeyPath:
    """Follow `params/params` (Linen variables, openpi's params item) down."""
    children = _children(paths, path)
    return _descend((*path, "params"), paths) if "params" in children else path


def _children(paths: Iterable[KeyPath], prefix: KeyPath) -> list[Segment]:
    depth = len(prefix)
    return list(dict.fromkeys(path[depth] for path in paths if len(path) > depth and path[:depth] == prefix))


def _beside_the_rest(paths: list[KeyPath], slots: set[KeyPath]) -> list[FoundParams]:
    """A tree of nothing else, whole; else the first-level subtrees that are no optimizer and no bookkeeping."""
    with_optimizer = {
        path[0] for path in paths if any(_is_optimizer(path[:depth], slots) for depth in range(1, len(path)))
    }
    tops = _children(paths, ())
    rest = [top for top in tops if top not in with_optimizer and top not in _BOOKKEEPING]
    if rest == tops:
        return [FoundParams((), False, "a tree of nothing but params is taken whole")] if paths else []
    return [FoundParams((top,), False, "the subtree beside the optimizer and the step") for top in rest]
