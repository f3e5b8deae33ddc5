"""Optimizer states: found in a checkpoint, given their optax types, matched to what a `tx` makes, reset and moved."""
