"""How much of the recipes `ok.match` finds without help: the share of leaves that is right, by specs and with values.

python tests/benchmarks/match.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matching.test_match import CASES, case_of, judged

import orbaxkit as ok


def main() -> None:
    """Print a line for each recipe."""
    for name in CASES:
        case = case_of(name)
        count = len(case.sources)
        for values in (False, True):
            right, wrong, surely = judged(ok.match(case.a, case.b, values=values), case)
            how = "values" if values else "specs"
            print(f"{name:10} {how:6} right {right / count:4.0%}  wrong {wrong / count:4.0%}  surely {surely}")


if __name__ == "__main__":
    main()
