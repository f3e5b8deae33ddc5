"""What `tx` makes of these params, without making it: the abstract optimizer state, under the params' shardings."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from orbaxkit.errors import CheckpointError, OrbaxkitError, TargetError
from orbaxkit.execute.devices import EMPTY
from orbaxkit.optimizer.stored import StoredState, TextPath, text_path
from orbaxkit.paths import KeyPath
from orbaxkit.slots import strip_value
from orbaxkit.specs import LeafSpec, nest
from orbaxkit.trees import Target, TargetLeaf, flatten


def params_of(state: StoredState, root: KeyPath | None) -> Any:
    """The checkpoint's own params, at `root`, as `jax.ShapeDtypeStruct`; without one, what the moments tell of them."""
    if root is None:
        found = state.mirrored
    else:
        found = {
            strip_value(path[len(root) :]): state.whole.leaves[name]
            for name, path in state.whole.paths.items()
            if path[: len(root)] == root and path[: len(state.root)] != state.root
        }
    arrays = {path: spec for path, spec in found.items() if spec.kind != "string" and (spec.dtype or spec.empty)}
    if not any(spec.dtype for spec in arrays.values()):
        hint = "give their shapes and dtypes: params=jax.eval_shape(…)"
        raise CheckpointError("the params are not in this checkpoint", hint=hint)
    return nest((path, placeholder(spec)) for path, spec in arrays.items() if spec.kind != "key")


def describe(spec: LeafSpec, sharding: Sharding | None = None) -> Any:
    """A leaf as a `jax.ShapeDtypeStruct`."""
    if spec.kind == "key":
        keys = jax.eval_shape(lambda: jax.random.key(0, impl=spec.key_impl))
        return jax.ShapeDtypeStruct(spec.shape, keys.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def abstract_state(tx: Any, params: Any) -> Any:
    """`jax.eval_shape(tx.init, params)`, its leaves under the shardings that follow the params'.

    Raises TargetError: `tx` is no optax transformation, or it cannot be used with these params.
    """
    if not hasattr(tx, "init"):
        raise TargetError(
            f"{type(tx).__name__} is no optax.GradientTransformation", hint="tx=optax.adamw(1e-3), with an init"
        )
    try:
        schema = jax.eval_shape(tx.init, params)
    except OrbaxkitError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        hint = "give the params that the optimizer was made for: params=…, or in ok.reset_optimizer target=…"
        raise TargetError(f"tx.init does not take these params: {told}", hint=hint) from error
    return with_shardings(schema, params)


def with_shardings(schema: Any, params: Any) -> Any:
    """The same abstract state with shardings: a leaf that mirrors a param has the param's, any other is replicated."""
    target, known = flatten(schema), flatten(params)
    if all(leaf.sharding is None for leaf in known.leaves.values()):
        return schema
    by_path = {text_path(leaf.path): leaf for leaf in known.leaves.values()}
    shared = _replicated(known)
    leaves = {name: describe(leaf.spec, sharding_like(leaf, by_path, shared)) for name, leaf in target.leaves.items()}
    return target.rebuild(leaves)


def sharding_like(leaf: TargetLeaf, params: Mapping[TextPath, TargetLeaf], shared: Sharding | None) -> Sharding | None:
    """The sharding of the param that a leaf of the state mirrors; `shared` for one that mirrors none."""
    param = mirrored_param(text_path(leaf.path), params)
    if param is None or param.sharding is None:
        return shared
    if param.spec.shape == leaf.spec.shape:
        return param.sharding
    return _with_leading_axis(param, leaf) or shared


def mirrored_param(path: TextPath, params: Mapping[TextPath, Any]) -> Any:
    """The param whose path ends the path of a leaf, the longest such one."""
    return next((params[path[k:]] for k in range(len(path) + 1) if path[k:] in params), None)


def _with_leading_axis(param: TargetLeaf, leaf: TargetLeaf) -> Sharding | None:
    """Memories of past values have one more axis in front, which is not sharded."""
    if leaf.spec.shape[1:] == param.spec.shape and isinstance(param.sharding, NamedSharding):
        return NamedSharding(param.sharding.mesh, PartitionSpec(None, *param.sharding.spec))
    return None


def _replicated(params: Target) -> Sharding | None:
    """Every device that the params lie on, all of the array on each."""
    shardings = [leaf.sharding for leaf in params.leaves.values() if leaf.sharding is not None]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else shardings[0]


def placeholder(spec: LeafSpec) -> Any:
    """A stored leaf as an abstract array; Python numbers stay numbers, and what is empty stays empty."""
    if spec.kind == "empty":
        return EMPTY[str(spec.empty)]()
    if spec.kind == "scalar" and spec.dtype is not None and spec.dtype.kind in "biuf":
        return spec.dtype.type(0).item()
    return describe(spec)
