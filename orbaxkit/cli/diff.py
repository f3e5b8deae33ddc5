"""`orbaxkit diff`: what differs between two checkpoints."""

import argparse
import json

from orbaxkit.cli.rules import add_rules

EXAMPLES = """\
examples:
  orbaxkit diff runs/pi0/10000 runs/pi0/20000 --values --rtol 1e-3
  orbaxkit diff runs/pi0 exported.safetensors --select 'params/**' --values
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `diff`."""
    parser.epilog = EXAMPLES
    parser.add_argument("a", metavar="A", help="a checkpoint; transforms are applied to this one")
    parser.add_argument("b", metavar="B", help="what it is compared with")
    add_rules(parser)
    parser.add_argument("--values", action="store_true", help="compare every value too, bit for bit or to a tolerance")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="tolerance relative to B's values")
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="absolute tolerance")
    parser.add_argument("--item", metavar="NAME", help="this item of both")
    parser.add_argument("--step", type=int, metavar="N", help="this step of both")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what differs; 1 if anything does."""
    import warnings

    from orbaxkit._diff import diff
    from orbaxkit.cli.messages import warn_on_stderr
    from orbaxkit.cli.rules import transforms_of
    from orbaxkit.errors import OrbaxkitError

    if (args.rtol or args.atol) and not args.values:
        raise OrbaxkitError("--rtol and --atol compare values", hint="add --values")
    with warnings.catch_warnings():
        warnings.showwarning = warn_on_stderr
        found = diff(
            args.a,
            args.b,
            *transforms_of(args.rules),
            values=args.values,
            rtol=args.rtol,
            atol=args.atol,
            step=args.step,
            item=args.item,
        )
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 1 if found else 0
