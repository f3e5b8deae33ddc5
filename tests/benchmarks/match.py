"""How much of the recipes `ok.match` finds without help: the share of leaves that is right, by specs and with values.

The last lines are by specs, with a tenth of the leaves missing on both sides, so that no modules are of one size.

python tests/benchmarks/match.py
"""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from matching.test_match import CASES, Case, arrays_of, case_of, judged

import orbaxkit as ok
from orbaxkit.paths import parse_path
from orbaxkit.specs import nest


def main() -> None:
    """Print a line for each recipe."""
    for name in CASES:
        case = case_of(name)
        count = len(case.sources)
        for values in (False, True):
            right, wrong, surely = judged(ok.match(case.a, case.b, values=values), case)
            how = "values" if values else "specs"
            print(f"{name:10} {how:6} right {right / count:4.0%}  wrong {wrong / count:4.0%}  surely {surely}")
    for name in CASES:
        case = _damaged(case_of(name))
        right, wrong, surely = judged(ok.match(case.a, case.b), case)
        count = len(case.sources)
        print(f"{name:10} holes  right {right / count:4.0%}  wrong {wrong / count:4.0%}  surely {surely}")


def _damaged(case: Case) -> Case:
    chance = random.Random(0)

    def kept(tree: Any) -> dict[str, Any]:
        return {name: array for name, array in arrays_of(tree).items() if chance.random() > 0.1}

    a, b = kept(case.a), kept(case.b)
    trees = [nest((parse_path(name), array) for name, array in each.items()) for each in (a, b)]
    return Case(*trees, {name: case.sources[name] for name in b}, case.computed)


if __name__ == "__main__":
    main()
