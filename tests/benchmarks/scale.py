"""The train state of a Llama-3-405B that 1,024 processes saved, its metadata alone: inspect, plan to reshape and reset.

python tests/benchmarks/scale.py [ROUNDS]
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import measure

FORMS = ("scanned", "one by one")


def write(folder: str, form: str) -> None:
    """126 layers scanned (40 leaves, 36,904 stored values) or one by one (3,415 leaves, 3,496,279)."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scale"))
    import llama

    Path(folder).mkdir()
    llama.write(Path(folder), llama.Model(is_scanned=form == "scanned"))


def plan(folder: str, form: str) -> None:
    """Print the seconds of plans: unstack, or stack; the optimizer started again, with its code and without."""
    import optax

    import orbaxkit as ok
    from orbaxkit._optimizer import _find_params
    from orbaxkit.optimizer.resetting import Choice, frame_of, plan_reset
    from orbaxkit.optimizer.zeroing import plan_zeroing

    ckpt = ok.open(folder)
    layers = ok.unstack("params/layers", into="layers_{i}", axis=0)
    rule = layers if form == "scanned" else layers.inverse()
    tx = optax.adamw(1e-3)
    ckpt.specs, tx.init({"w": 0.0})  # read, and jax started
    start = time.perf_counter()
    reshaped = ok.plan(ckpt, rule)
    seconds = {"reshape": time.perf_counter() - start, "leaves": len(reshaped.outputs)}
    start = time.perf_counter()
    frame = frame_of(ckpt.specs, tx, None, _find_params, None, folder)
    plan_reset(ckpt.specs, frame, Choice(("step",), None), False, False, None, folder)
    seconds["reset"] = time.perf_counter() - start
    start = time.perf_counter()
    ok.plan(ckpt, plan_zeroing(ckpt.specs, ("step",)))
    print(json.dumps(seconds | {"reset on disk": time.perf_counter() - start}))


def main(rounds: int) -> None:
    orbaxkit = str(Path(sys.executable).with_name("orbaxkit"))
    rows, verdicts = [], []
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            path = f"{folder}/{form}"
            measure.python(__file__, "write", path, form)
            runs = [measure.run(orbaxkit, "inspect", path) for _ in range(rounds)]
            plans = [measure.python(__file__, "plan", path, form).report for _ in range(rounds)]
            best = {key: min(found[key] for found in plans) for key in ("reshape", "reset", "reset on disk")}
            seconds, peak = min(r.seconds for r in runs), min(r.peak_bytes for r in runs) / measure.MB
            rows.append({"layers": form, "inspect": seconds, "peak MB": peak, **best})
            verdicts += [
                measure.verdict(f"{form}: seconds to inspect", seconds, 5.0),
                measure.verdict(f"{form}: MB to inspect", peak, 500.0),
                *(measure.verdict(f"{form}: seconds to plan a {key}", value, 2.0) for key, value in best.items()),
            ]
    print(measure.table(rows), measure.table(verdicts), sep="\n\n")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("write", "plan"):
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
