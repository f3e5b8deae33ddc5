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
from orbaxkit._params import find_params
from orbaxkit._restore import restore, restore_params
from orbaxkit.paths import format_path
from orbaxkit.planning import make_plan
from orbaxkit.planning.scanned import find_scanned
from orbaxkit.specs import nest
from orbaxkit.transforms import select, unstack

# The seed of every random number here: a tour prints the same values each time.
SEED = 0
TRAIN_STEPS = 3


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
        yield from stop.show(checkpoint)
        yield ""


def _look(checkpoint: Checkpoint) -> Iterator[str]:
    yield str(checkpoint)


def _restore(checkpoint: Checkpoint) -> Iterator[str]:
    import jax

    path = format_path(find_params(checkpoint.specs).path)
    plan = make_plan(checkpoint.specs, *([select(f"{path}/**")] if path else []))
    start = time.perf_counter()
    params = jax.block_until_ready(restore_params(checkpoint))
    seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(params)
    stored = sum(spec.stored_bytes or 0 for spec in checkpoint.specs.values())
    yield f"{len(leaves)} leaves, {sum(np.size(leaf) for leaf in leaves):,} parameters, from {path or 'the whole tree'}"
    yield f"read {plan.read_bytes:,} bytes of {stored:,} in {seconds:.2f} s: the rest stayed on disk"


def _reshape(checkpoint: Checkpoint) -> Iterator[str]:
    import jax

    inside = format_path(find_params(checkpoint.specs).path)
    scanned = [found for found in find_scanned(checkpoint.specs) if found.path.startswith(inside) and found.layers]
    if not scanned:
        yield "no subtree of the params looks scanned over layers: nothing to unstack"
        return
    blocks = scanned[0]
    name = blocks.path.rpartition("/")[2]
    unstack_blocks = unstack(blocks.path, into=f"{name}_{{i}}", axis=blocks.axis)
    plan = make_plan(checkpoint.specs, select(f"{blocks.path}/**"), unstack_blocks)
    yield str(plan)
    layers = restore(checkpoint, select(f"{blocks.path}/**"), unstack_blocks)
    back = apply(layers, unstack_blocks.inverse())
    same = jax.tree.map(np.array_equal, back, restore(checkpoint, select(f"{blocks.path}/**")))
    yield f"{len(plan.outputs)} leaves of {blocks.layers} layers; stacked again: {_verdict(same)}"


def _verdict(same: Any) -> str:
    import jax

    return "equal to what was saved" if all(jax.tree.leaves(same)) else "NOT what was saved"


STOPS = (
    Stop("What is in it, from metadata alone", "print(ckpt := ok.open(path))", _look),
    Stop("Only the params, onto the default device", "params = ok.restore_params(ckpt)", _restore),
    Stop("Scanned layers one by one, planned on metadata, and back", "print(ok.plan(ckpt, ok.unstack(…)))", _reshape),
)


# The example: a pi0-like train state, a hundredth as wide. The vision tower's blocks are scanned and train; those of
# the language model are scanned, frozen and bfloat16, so that the optimizer holds no moments for them.
WIDTH, HIDDEN, HEADS, HEAD_WIDTH = 48, 128, 4, 12
VISION_LAYERS, LANGUAGE_LAYERS, LANGUAGE_WIDTH, ACTION_WIDTH = 27, 18, 64, 32


def _vision_shapes() -> dict[str, tuple[int, ...]]:
    layers, block = VISION_LAYERS, "img/Transformer/encoderblock"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    shapes: dict[str, tuple[int, ...]] = {
        "img/Transformer/encoder_norm/bias": (WIDTH,),
        "img/Transformer/encoder_norm/scale": (WIDTH,),
        f"{block}/MlpBlock_0/Dense_0/bias": (layers, HIDDEN),
        f"{block}/MlpBlock_0/Dense_0/kernel": (layers, WIDTH, HIDDEN),
        f"{block}/MlpBlock_0/Dense_1/bias": (layers, WIDTH),
        f"{block}/MlpBlock_0/Dense_1/kernel": (layers, HIDDEN, WIDTH),
        f"{attention}/out/bias": (layers, WIDTH),
        f"{attention}/out/kernel": (layers, HEADS, HEAD_WIDTH, WIDTH),
        "img/embedding/bias": (WIDTH,),
        "img/embedding/kernel": (14, 14, 3, WIDTH),
        "img/head/bias": (LANGUAGE_WIDTH,),
        "img/head/kernel": (WIDTH, LANGUAGE_WIDTH),
        "img/pos_embedding": (1, 256, WIDTH),
    }
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        shapes |= {f"{block}/{norm}/{name}": (layers, WIDTH) for name in ("bias", "scale")}
    for part in ("key", "query", "value"):
        shapes[f"{attention}/{part}/bias"] = (layers, HEADS, HEAD_WIDTH)
        shapes[f"{attention}/{part}/kernel"] = (layers, WIDTH, HEADS, HEAD_WIDTH)
    return {f"PaliGemma/{name}": shape for name, shape in shapes.items()}


def _action_shapes() -> dict[str, tuple[int, ...]]:
    kernels = {
        "action_in_proj": (ACTION_WIDTH, WIDTH),
        "action_out_proj": (WIDTH, ACTION_WIDTH),
        "time_mlp_in": (WIDTH, WIDTH),
        "time_mlp_out": (WIDTH, WIDTH),
    }
    biases = {f"{name}/bias": shape[-1:] for name, shape in kernels.items()}
    return biases | {f"{name}/kernel": shape for name, shape in kernels.items()}


def _language_shapes() -> dict[str, tuple[int, ...]]:
    layers, width = LANGUAGE_LAYERS, LANGUAGE_WIDTH
    return {
        "PaliGemma/llm/embedder/input_embedding": (1024, width),
        "PaliGemma/llm/final_norm/scale": (width,),
        "PaliGemma/llm/layers/attn/attn_vec_einsum/w": (layers, 8, width // 8, width),
        "PaliGemma/llm/layers/attn/kv_einsum/w": (layers, 2, 1, width, width // 8),
        "PaliGemma/llm/layers/attn/q_einsum/w": (layers, 8, width, width // 8),
        "PaliGemma/llm/layers/mlp/gating_einsum": (layers, 2, width, 4 * width),
        "PaliGemma/llm/layers/mlp/linear": (layers, 4 * width, width),
        "PaliGemma/llm/layers/pre_attention_norm/scale": (layers, width),
        "PaliGemma/llm/layers/pre_ffw_norm/scale": (layers, width),
    }


def write_example(folder: Path) -> None:
    """Train the example a few steps and save it as openpi does: an item of params, an item of everything else."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    trained = _random_tree(_vision_shapes() | _action_shapes(), jnp.float32)
    frozen = _random_tree(_language_shapes(), jnp.bfloat16)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)))

    def loss(params: Any) -> Any:
        return sum(jnp.mean(jnp.square(leaf - 0.5)) for leaf in jax.tree.leaves(params))

    @jax.jit
    def train_step(params: Any, opt_state: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(trained)
    for _ in range(TRAIN_STEPS):
        trained, opt_state = train_step(trained, opt_state)
    items = {
        "params": {"params": _merge(trained, frozen)},
        "train_state": {"step": jnp.asarray(TRAIN_STEPS), "opt_state": opt_state},
    }
    with ocp.CheckpointManager(folder.absolute()) as manager:
        saves = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        manager.save(TRAIN_STEPS, args=ocp.args.Composite(**saves))


def _random_tree(shapes: dict[str, tuple[int, ...]], dtype: Any) -> Any:
    """Random leaves, each under `…/value`, where nnx.State puts them. By numpy: JAX would compile once per shape."""
    import jax.numpy as jnp

    random = np.random.default_rng(SEED)
    arrays = (jnp.asarray(random.standard_normal(shape, np.float32), dtype) for shape in shapes.values())
    return nest(((*name.split("/"), "value"), array) for name, array in zip(shapes, arrays, strict=True))


def _merge(a: Any, b: Any) -> Any:
    """Both trees of dicts in one."""
    shared = {key: _merge(a[key], b[key]) for key in a.keys() & b.keys()}
    return a | b | shared
