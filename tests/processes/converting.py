"""What each process runs in the tests of `convert` in several processes."""

import os
import time
from collections.abc import Callable
from typing import Any

SILENCE_SECONDS = 3.0

Outcome = tuple[str, str, float]  # "ok" or the class of an error, the path or its text, and the seconds it took


def attempt(call: Callable[[], Any]) -> Outcome:
    """What came of a call."""
    start = time.monotonic()
    try:
        return "ok", str(call()), time.monotonic() - start
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


def rules() -> dict[str, tuple[Any, ...]]:
    """The conversions that are compared with those of one process."""
    import orbaxkit as ok

    return {
        "copied": (),
        "one leaf": (ok.select("layers/w"),),
        "cast": (ok.cast("bfloat16", "layers/**"), ok.cast("bfloat16", "embed")),
        "unstacked": (ok.unstack("layers", into="layer_{i}", axis=0), ok.cast("float16", "embed")),
    }


def tree() -> dict[str, Any]:
    """The same in every process; in memory."""
    import numpy as np

    return {"w": np.random.default_rng(1).standard_normal((700, 1000)), "step": 3, "name": "a run"}


def convert_all(folder: str) -> dict[str, Outcome]:
    """Everything that works, and what is refused before anything is written."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import orbaxkit as ok

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = jax.jit(lambda: np.ones(16), out_shardings=NamedSharding(mesh, PartitionSpec("x")))()
    source, out = f"{folder}/source", f"{folder}/together"
    calls = {name: lambda name=name: ok.convert(source, f"{out}/{name}", *rules()[name]) for name in rules()}
    calls |= {
        "zarr3": lambda: ok.convert(f"{folder}/zarr3", f"{out}/zarr3"),
        "a run": lambda: ok.convert(f"{folder}/run", f"{out}/a run", as_step=9, memory_limit="40MB"),
        "overwritten": lambda: ok.convert(source, f"{folder}/stands", overwrite=True),
        "memory": lambda: ok.convert(tree(), f"{out}/memory"),
        "exists": lambda: ok.convert(source, f"{out}/copied"),
        "safetensors": lambda: ok.convert(source, f"{out}/model.safetensors"),
        "spread": lambda: ok.convert({"w": spread}, f"{out}/spread"),
    }
    return {name: attempt(call) for name, call in calls.items()}


def convert_two(folder: str) -> dict[str, Outcome]:
    """A copy and a transform."""
    import orbaxkit as ok

    names = ("copied", "cast")
    return {
        name: attempt(lambda n=name: ok.convert(f"{folder}/source", f"{folder}/four/{n}", *rules()[n]))
        for name in names
    }


def fail_in_turn(folder: str) -> dict[str, Outcome]:
    """What process 1 of three does to the others, one thing after the other; last it dies."""
    import jax

    import orbaxkit as ok
    from orbaxkit.formats import processes

    processes.SILENCE_SECONDS = SILENCE_SECONDS
    is_victim = jax.process_index() == 1

    def convert(name: str, source: str = "source", *transforms: Any, **options: Any) -> Outcome:
        return attempt(lambda: ok.convert(f"{folder}/{source}", f"{folder}/failing/{name}", *transforms, **options))

    def only_there(action: Callable[[], Any]) -> Callable[[int, int], Any]:
        return lambda done, total: action() if is_victim else time.sleep(0.05)

    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    return {
        "raises": convert("raises", progress=only_there(fail)),
        "meets damage": convert("meets damage", "damaged", ok.cast("float16")),
        "differs": convert("differs", "source", ok.select("embed" if is_victim else "layers/w")),
        "lacks the source": convert("lacks the source", "nowhere" if is_victim else "source"),
        "hangs": convert("hangs", progress=only_there(lambda: time.sleep(2.5 * SILENCE_SECONDS))),
        "works again": convert("works again"),
        "dies": convert("dies", progress=only_there(lambda: os._exit(7))),
    }


def first_dies(folder: str) -> Outcome:
    """Process 0 dies, through which all talk."""
    import jax

    import orbaxkit as ok

    def progress(done: int, total: int) -> None:
        os._exit(7) if jax.process_index() == 0 else time.sleep(0.2)

    return attempt(lambda: ok.convert(f"{folder}/source", f"{folder}/orphans/out", progress=progress))
