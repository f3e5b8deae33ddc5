"""What each process runs in the tests of `convert` to an object store."""

from typing import Any


def convert_all(source: str, out: str) -> list[Any]:
    """A copy, a step, one that is there already, and one in which process 1 fails."""
    import jax

    import orbaxkit as ok

    def fail(done: int, total: int) -> None:
        if jax.process_index() == 1:
            raise RuntimeError("the disk is on fire")

    outcomes: list[Any] = []
    for path, options in (
        (f"{out}/copy", {}),
        (f"{out}/run", {"as_step": 3}),
        (f"{out}/copy", {}),
        (f"{out}/failing", {"progress": fail}),
    ):
        try:
            outcomes.append(str(ok.convert(source, path, **options)))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes
