"""The errors a caller may handle, and the one layout every message has."""

from collections.abc import Iterable

SHOWN_LEAVES = 5


class OrbaxkitError(Exception):
    """Anything orbaxkit refuses to do.

    The text shows at most five offending leaves; `leaves` holds every one, as `(path, what is wrong)`.

    >>> try:
    ...     ok.plan("runs/pi0", ok.select("parms/**"))
    ... except ok.OrbaxkitError as error:
    ...     print(error.leaves[0][0])
    parms/**
    """

    def __init__(
        self,
        what: str,
        *,
        leaves: Iterable[tuple[str, str]] = (),
        where: object = None,
        hint: str | None = None,
    ):
        self.leaves = tuple(leaves)
        super().__init__(_message(what, self.leaves, where, hint))


class CheckpointError(OrbaxkitError):
    """What is on disk cannot be opened or read: no checkpoint, unfinished, damaged or hostile.

    >>> ok.open("runs/pi1")
    Traceback (most recent call last):
    orbaxkit.errors.CheckpointError: no such file or folder
    where: ...
    """


class TargetError(OrbaxkitError):
    """The checkpoint and the target disagree, or a value does not survive the dtype that was asked for.

    >>> ok.restore_params("runs/pi0", target={"head": {"kernel": jnp.zeros((8, 3), jnp.bfloat16)}})
    Traceback (most recent call last):
    orbaxkit.errors.TargetError: the checkpoint and the target disagree on 1 leaf
    ...
    """


class TransformError(OrbaxkitError):
    """A pattern or a rule cannot be applied to these leaves.

    >>> ok.unstack("params/blocks", into="block")
    Traceback (most recent call last):
    orbaxkit.errors.TransformError: into='block' must have one {i} for the layer's number
    hint: ...
    """


class NotInvertibleError(TransformError):
    """Some leaves of a plan cannot be computed back.

    >>> ok.cast("bfloat16").inverse()
    Traceback (most recent call last):
    orbaxkit.errors.NotInvertibleError: the dtypes before the cast are not known
    ...
    """


class CheckpointWarning(UserWarning):
    """Something about a checkpoint cannot be known; what was assumed is in the text.

    >>> import warnings
    >>> warnings.simplefilter("error", ok.CheckpointWarning)  # be strict about what has to be assumed
    """


def shown(text: object) -> str:
    """Make text from a file safe to print: control and bidirectional-override characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shorten(lines: Iterable[str], most: int = SHOWN_LEAVES) -> list[str]:
    """The first lines, then how many more there are."""
    lines = list(lines)
    rest = len(lines) - most
    return lines if rest <= 0 else [*lines[:most], f"and {rest:,} more"]


def _message(what: str, leaves: tuple[tuple[str, str], ...], where: object, hint: str | None) -> str:
    rows = shorten(f"{path or '(root)'}: {problem}" if problem else path for path, problem in leaves)
    lines = [what, *(f"  {row}" for row in rows)]
    if where is not None:
        lines.append(f"where: {where}")
    if hint:
        lines.append(f"hint: {hint}")
    return "\n".join("\n".join(shown(part) for part in line.split("\n")) for line in lines)
