"""The tour's example: a small train state with the names of a pi0 run, trained a few steps and saved with Orbax."""

from pathlib import Path
from typing import Any

import numpy as np

from orbaxkit.specs import nest

# The seed of every random number here: a tour prints the same values each time.
SEED = 0
TRAIN_STEPS = 3

# A pi0-like train state, a hundredth as wide. The vision tower's blocks are scanned and train; those of
# the language model are scanned, frozen and bfloat16, so that the optimizer holds no moments for them.
WIDTH, HIDDEN, HEADS, HEAD_WIDTH = 48, 128, 4, 12
VISION_LAYERS, LANGUAGE_LAYERS, LANGUAGE_WIDTH, ACTION_WIDTH = 27, 18, 64, 32


_LANGUAGE = "PaliGemma/llm"


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
    """Both experts of the language model: the second one is as wide as the actions, and its norms are adaptive."""
    layers, adaptive = f"{_LANGUAGE}/layers", {"kernel": (WIDTH, 3 * WIDTH), "bias": (3 * WIDTH,)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{_LANGUAGE}/embedder/input_embedding": (1024, LANGUAGE_WIDTH),
        f"{_LANGUAGE}/final_norm/scale": (LANGUAGE_WIDTH,),
    }
    shapes |= {f"{_LANGUAGE}/final_norm_1/Dense_0/{name}": shape for name, shape in adaptive.items()}
    for norm in ("pre_attention_norm", "pre_ffw_norm"):
        shapes[f"{layers}/{norm}/scale"] = (LANGUAGE_LAYERS, LANGUAGE_WIDTH)
        shapes |= {f"{layers}/{norm}_1/Dense_0/{name}": (LANGUAGE_LAYERS, *shape) for name, shape in adaptive.items()}
    for suffix, width in (("", LANGUAGE_WIDTH), ("_1", WIDTH)):
        layer = {
            f"attn/attn_vec_einsum{suffix}/w": (8, 8, width),
            f"attn/kv_einsum{suffix}/w": (2, 1, width, 8),
            f"attn/q_einsum{suffix}/w": (8, width, 8),
            f"mlp{suffix}/gating_einsum": (2, width, 4 * width),
            f"mlp{suffix}/linear": (4 * width, width),
        }
        shapes |= {f"{layers}/{name}": (LANGUAGE_LAYERS, *shape) for name, shape in layer.items()}
    return shapes


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
