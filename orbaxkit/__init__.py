"""See any Orbax checkpoint, restore what you need of it, and reshape it, without the code that wrote it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbaxkit._apply import apply
    from orbaxkit._checkpoint import Checkpoint
    from orbaxkit._checkpoint import open_checkpoint as open
    from orbaxkit._convert import convert
    from orbaxkit._diff import diff
    from orbaxkit._match import match
    from orbaxkit._optimizer import migrate_opt_state, rebuild_opt_state, reset_optimizer
    from orbaxkit._plan import plan
    from orbaxkit._restore import restore, restore_params
    from orbaxkit._verify import verify
    from orbaxkit.errors import (
        CheckpointError,
        CheckpointWarning,
        NotInvertibleError,
        OrbaxkitError,
        TargetError,
        TransformError,
    )
    from orbaxkit.planning import Plan
    from orbaxkit.recipes import recipe
    from orbaxkit.specs import LeafSpec, Specs
    from orbaxkit.transforms import (
        affine,
        cast,
        chain,
        concat,
        drop,
        fill,
        from_json,
        merge_lora,
        place_rows,
        rename,
        reshape,
        select,
        split,
        stack,
        transpose,
        unreplicate,
        unstack,
    )

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "LeafSpec",
    "NotInvertibleError",
    "OrbaxkitError",
    "Plan",
    "Specs",
    "TargetError",
    "TransformError",
    "__version__",
    "affine",
    "apply",
    "cast",
    "chain",
    "concat",
    "convert",
    "diff",
    "drop",
    "fill",
    "from_json",
    "match",
    "merge_lora",
    "migrate_opt_state",
    "open",
    "place_rows",
    "plan",
    "rebuild_opt_state",
    "recipe",
    "rename",
    "reset_optimizer",
    "reshape",
    "restore",
    "restore_params",
    "select",
    "split",
    "stack",
    "transpose",
    "unreplicate",
    "unstack",
    "verify",
]

# Where public names live when it is not `transforms`; they load on first use, so that importing orbaxkit costs nothing.
_HOMES = {
    "_apply": ("apply",),
    "_checkpoint": ("Checkpoint", "open"),
    "_convert": ("convert",),
    "_diff": ("diff",),
    "_match": ("match",),
    "_optimizer": ("migrate_opt_state", "rebuild_opt_state", "reset_optimizer"),
    "_plan": ("plan",),
    "_restore": ("restore", "restore_params"),
    "_verify": ("verify",),
    "errors": (
        "CheckpointError",
        "CheckpointWarning",
        "NotInvertibleError",
        "OrbaxkitError",
        "TargetError",
        "TransformError",
    ),
    "planning": ("Plan",),
    "recipes": ("recipe",),
    "specs": ("LeafSpec", "Specs"),
}
# Names that are spelled otherwise at home, where they would hide a builtin.
_HOME_NAMES = {"open": "open_checkpoint"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first asked for (PEP 562)."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'orbaxkit' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "transforms")
    value = getattr(import_module(f"orbaxkit.{home}"), _HOME_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
