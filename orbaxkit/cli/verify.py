"""`orbaxkit verify`: is every byte of a checkpoint there, whole and decodable?"""

import argparse
import json

EXAMPLES = """\
examples:
  orbaxkit verify runs/pi0/20000 --hash
  orbaxkit verify params --values
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `verify`."""
    parser.epilog = EXAMPLES
    parser.add_argument("path", metavar="PATH", help="a checkpoint, a step, an item, or the root of a run")
    parser.add_argument("--values", action="store_true", help="also look for NaN, infinities and constant arrays")
    parser.add_argument("--hash", action="store_true", help="write checksums beside the checkpoint, for later checks")
    parser.add_argument("--item", metavar="NAME", help="only this item of the step")
    parser.add_argument("--step", type=int, metavar="N", help="this step of a run (default: the latest finished one)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if anything is wrong."""
    import warnings

    from orbaxkit._verify import verify
    from orbaxkit.errors import CheckpointWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # they are among the notes
        found = verify(args.path, values=args.values, hash=args.hash, step=args.step, item=args.item)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 0 if found else 1
