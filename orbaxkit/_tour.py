"""A tour of what orbaxkit does, on a small checkpoint that it writes itself or on one of yours, which it only reads."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orbaxkit._apply import apply
from orbaxkit._checkpoint import Checkpoint, open_checkpoint
from orbaxkit._convert import convert
from orbaxkit._diff import diff
from orbaxkit._example import TRAIN_STEPS, write_example
from orbaxkit._optimizer import rebuild_opt_state, reset_optimizer
from orbaxkit._params import find_params
from orbaxkit._restore import restore, restore_params
from orbaxkit._verify import verify
from orbaxkit.display.text import counted
from orbaxkit.errors import OrbaxkitError
from orbaxkit.optimizer.stored import find_states
from orbaxkit.paths import KeyPath, format_path, parse_path
from orbaxkit.planning import Transform, make_plan
from orbaxkit.planning.scanned import Scanned, find_scanned
from orbaxkit.recipes import recipe
from orbaxkit.transforms import select, unstack


@dataclass(frozen=True)
class Stop:
    """One stop of the tour: what it shows, the call that shows it, and the lines it prints for a checkpoint."""

    title: str
    call: str
    show: Callable[[Checkpoint], Iterable[str]]


def tour(path: Any = None, *, progress: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Yield the tour's lines. Without a path, a small pi0-shaped checkpoint is first written to a temporary folder."""
    if path is not None:
        yield from _walk(open_checkpoint(path))
        return
    with tempfile.TemporaryDirectory(prefix="orbaxkit-tour-") as folder:
        progress(f"training {TRAIN_STEPS} steps and saving them with Orbax")
        start = time.perf_counter()
        write_example(Path(folder))
        progress(f"saved in {time.perf_counter() - start:.1f} s")
        yield from _walk(open_checkpoint(folder))


def _walk(checkpoint: Checkpoint) -> Iterator[str]:
    for number, stop in enumerate(STOPS, start=1):
        yield f"{number}. {stop.title}"
        yield f">>> {stop.call}"
        try:
            yield from stop.show(checkpoint)
        except OrbaxkitError as error:  # what this checkpoint lacks, in the words that the call itself has for it
            yield str(error)
        yield ""


def _look(checkpoint: Checkpoint) -> Iterator[str]:
    yield str(checkpoint)


def _restore(checkpoint: Checkpoint) -> Iterator[str]:
    import jax

    path = find_params(checkpoint.specs).path
    plan = make_plan(checkpoint.specs, *_params_alone(path))
    start = time.perf_counter()
    params = jax.block_until_ready(restore_params(checkpoint))
    seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(params)
    stored = sum(spec.stored_bytes or 0 for spec in checkpoint.specs.values())
    origin = format_path(path) or "the whole tree"
    yield f"{len(leaves)} leaves, {sum(np.size(leaf) for leaf in leaves):,} parameters, from {origin}"
    rest = ": the rest stayed on disk" if plan.dropped else ""
    yield f"read {plan.read_bytes:,} bytes of {stored:,} in {seconds:.2f} s{rest}"


def _reshape(checkpoint: Checkpoint) -> Iterator[str]:
    import jax

    scanned = _scanned_params(checkpoint)
    if not scanned:
        yield "no subtree of the params looks scanned over layers: nothing to unstack"
        return
    blocks = scanned[0]
    name = blocks.path.rpartition("/")[2]
    chosen = select(f"{blocks.path}/**")
    unstack_blocks = unstack(blocks.path, into=f"{name}_{{i}}", axis=blocks.axis)
    plan = make_plan(checkpoint.specs, chosen, unstack_blocks)
    yield str(plan)
    back = apply(restore(checkpoint, chosen, unstack_blocks), unstack_blocks.inverse())
    same = jax.tree.map(np.array_equal, back, restore(checkpoint, chosen))
    yield f"{len(plan.outputs)} leaves of {blocks.layers} layers; stacked again: {_verdict(same)}"
    yield from (f"also scanned: {other}" for other in scanned[1:])


def _scanned_params(checkpoint: Checkpoint) -> list[Scanned]:
    """The scanned subtrees within the params whose layer axis is known."""
    inside = find_params(checkpoint.specs).path
    found = [scanned for scanned in find_scanned(checkpoint.specs) if scanned.layers]
    return [scanned for scanned in found if parse_path(scanned.path)[: len(inside)] == tuple(map(str, inside))]


def _verdict(same: Any) -> str:
    import jax

    return "equal to what was saved" if all(jax.tree.leaves(same)) else "NOT what was saved"


def _rebuild(checkpoint: Checkpoint) -> Iterator[str]:
    roots = find_states(checkpoint.specs)
    for root in roots:
        yield _types(rebuild_opt_state(checkpoint, at=format_path(root)))
    if not roots:
        yield "there is no optimizer state in it: nothing to rebuild"


def _types(node: Any) -> str:
    """The classes of a state's nodes; arrays as their values where they are numbers, else as how many there are."""
    import jax

    if hasattr(node, "_fields"):
        inner = [f"{name}={_types(getattr(node, name))}" for name in node._fields]
        return f"{type(node).__name__}({', '.join(inner)})"
    if isinstance(node, tuple):
        return f"({', '.join(map(_types, node))})"
    leaves = jax.tree.leaves(node)
    if len(leaves) == 1 and np.ndim(leaves[0]) == 0:
        return str(leaves[0])
    return f"<{counted(len(leaves), 'array')}>"


def _reset(checkpoint: Checkpoint) -> Iterator[str]:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(1e-3)
    state = reset_optimizer(checkpoint, tx, keep="step" if _has_step(checkpoint) else ())
    moments = state["opt_state"][0]
    zero = "NOT zero" if any(bool(jnp.any(x)) for x in jax.tree.leaves((moments.mu, moments.nu))) else "zero"
    count = counted(len(jax.tree.leaves(moments.mu)), "param")
    yield f"step {state.get('step', 'unknown')}, Adam count {moments.count}, moments of {count}: {zero}"

    @jax.jit
    def train_step(params: Any, opt_state: Any) -> Any:
        gradients = jax.tree.map(jnp.ones_like, params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    _, opt_state = train_step(state["params"], state["opt_state"])
    yield f"one jitted training step later: Adam count {opt_state[0].count}"


def _has_step(checkpoint: Checkpoint) -> bool:
    return any(path[-1:] == ("step",) for path in checkpoint.specs.paths.values())


def _export(checkpoint: Checkpoint) -> Iterator[str]:
    params = _params_alone(find_params(checkpoint.specs).path)
    with tempfile.TemporaryDirectory(prefix="orbaxkit-tour-") as folder:
        exported = Path(convert(checkpoint, Path(folder) / "model.safetensors", *params))
        yield f"{exported.name}: {exported.stat().st_size:,} bytes"
        yield str(diff(checkpoint, exported, *params, values=True))
        yield str(verify(exported))


def _recipe(checkpoint: Checkpoint) -> Iterator[str]:
    params = _params_alone(find_params(checkpoint.specs).path)
    plan = make_plan(checkpoint.specs, *params, recipe("openpi"))
    with tempfile.TemporaryDirectory(prefix="orbaxkit-tour-") as folder:
        exported = convert(checkpoint, Path(folder) / "model.safetensors", *params, recipe("openpi"))
        yield f"{len(plan.outputs)} tensors under the names of openpi's PyTorch port, such as"
        yield from list(plan.outputs)[:3]
        yield str(diff(checkpoint, exported, *params, recipe("openpi"), values=True)).splitlines()[-1]


def _params_alone(path: KeyPath) -> tuple[Transform, ...]:
    return (select(f"{format_path(path)}/**"),) if path else ()


STOPS = (
    Stop("What is in it, from metadata alone", "print(ckpt := ok.open(path))", _look),
    Stop("Only the params, onto the default device", "params = ok.restore_params(ckpt)", _restore),
    Stop("Scanned layers one by one, planned on metadata, and back", "print(ok.plan(ckpt, ok.unstack(…)))", _reshape),
    Stop("The optimizer's state with its real types", "opt_state = ok.rebuild_opt_state(ckpt)", _rebuild),
    Stop("A fresh optimizer, and on with the training", "state = ok.reset_optimizer(ckpt, tx, keep='step')", _reset),
    Stop(
        "The params as safetensors, compared with where they came from, and verified",
        "ok.convert(ckpt, 'model.safetensors', …); ok.diff(…, values=True); ok.verify('model.safetensors')",
        _export,
    ),
    Stop(
        "Into another world by a recipe, if it is a pi0 or pi0.5",
        "ok.convert(ckpt, 'model.safetensors', ok.select('params/**'), ok.recipe('openpi'))",
        _recipe,
    ),
)
