"""How much of the recipes `ok.match` finds without help: the share of leaves that is right, by specs and with values.

python tests/benchmarks/match.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matching.test_match import CASES, judged

import orbaxkit as ok
from orbaxkit.planning.nodes import reads_of


def main() -> None:
    """Print a line for each recipe."""
    for name, (path, before, rules) in CASES.items():
        a, b = ok.restore(path, *before, as_numpy=True), ok.restore(path, *rules, as_numpy=True)
        plan = ok.plan(path, *rules)
        truth = {goal: {read.name for read in reads_of(output.expr)} for goal, output in plan.outputs.items()}
        for values in (False, True):
            right, wrong, surely = judged(ok.match(a, b, values=values), truth)
            how = "values" if values else "specs"
            print(
                f"{name:10} {how:6} right {right / len(truth):4.0%}  wrong {wrong / len(truth):4.0%}  surely {surely}"
            )


if __name__ == "__main__":
    main()
