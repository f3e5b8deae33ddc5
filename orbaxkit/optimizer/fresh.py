"""Leaves as `tx.init` makes them, jitted, each under the sharding of its param."""

from collections.abc import Iterable
from typing import Any

import jax

from orbaxkit.optimizer.schema import abstract_state
from orbaxkit.trees import flatten


def initial_leaves(tx: Any, params: Any, names: Iterable[str]) -> dict[str, Any]:
    """The named leaves of `tx.init(params)`; what is not named is not computed."""
    names = list(names)
    if not names:
        return {}
    schema = flatten(abstract_state(tx, params))
    shardings = {name: schema.leaves[name].sharding for name in names}

    def initial(params: Any) -> dict[str, Any]:
        leaves = flatten(tx.init(params)).leaves
        return {name: leaves[name].value for name in names}

    return dict(jax.jit(initial, out_shardings=shardings)(params))
