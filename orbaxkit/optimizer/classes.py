"""Real optax states from the table's entries; nothing that a file names is imported."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from orbaxkit.errors import CheckpointError
from orbaxkit.execute.devices import EMPTY
from orbaxkit.states import StateClass


def installed(state: StateClass) -> type:
    """The installed optax's class. Raises CheckpointError: it has none, or one with other fields."""
    found = _find(state)
    if found is None or set(found._fields) != set(state.fields):  # type: ignore[attr-defined]
        import optax

        problem = "has no such class" if found is None else f"has it with {', '.join(found._fields)}"  # type: ignore[attr-defined]
        form = f"{state.name} ({', '.join(state.fields)})"
        raise CheckpointError(
            f"the state {form} is of another optax release: {optax.__version__} {problem}",
            hint="give the tx: ok.rebuild_opt_state(ckpt, tx) matches by field names",
        )
    return found


def _find(state: StateClass) -> type | None:
    try:
        return getattr(import_module(state.module), state.name, None)
    except ImportError:
        return None


def make_state(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A state of a table's class, or of the caller's own."""
    return (installed(kind) if isinstance(kind, StateClass) else kind)(**fields)


def make_empty(name: str) -> Any:
    """What stands for nothing."""
    import optax

    if name in ("EmptyState", "MaskedNode"):
        return optax.EmptyState() if name == "EmptyState" else optax.MaskedNode()
    return {"dict": {}, "list": []}[name] if name in ("dict", "list") else EMPTY[name]()
