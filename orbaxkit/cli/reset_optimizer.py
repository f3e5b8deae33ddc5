"""`orbaxkit reset-optimizer`: a checkpoint with its optimizer started again, without the code that made it."""

import argparse
import sys

from orbaxkit.cli.convert import add_writing

EXAMPLES = """\
examples:
  orbaxkit reset-optimizer runs/pi0 restarted --as-step 0
  orbaxkit reset-optimizer runs/pi0/20000 restarted --keep step --keep schedule --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `reset-optimizer`."""
    parser.epilog = EXAMPLES
    parser.add_argument("source", metavar="SRC", help="a checkpoint, a step, an item, or the root of a run")
    parser.add_argument("destination", metavar="DST", help="where the new checkpoint goes; must not exist")
    words = "step, schedule, a field (nu), a state (adam) or a pattern of paths"
    parser.add_argument("--keep", action="append", default=[], metavar="NAME", help=f"what stays: {words}")
    parser.add_argument("--only", action="append", metavar="NAME", help="what starts again, in the same words")
    parser.add_argument("--at", metavar="PATH", help="the path of the optimizer state, where there are several")
    parser.add_argument("--allow-bias-mismatch", action="store_true", help="counts may part from their moments")
    add_writing(parser)


def run(args: argparse.Namespace) -> int:
    """Decide on metadata, say what was assumed, write."""
    import warnings

    from orbaxkit._checkpoint import open_checkpoint
    from orbaxkit.cli.convert import write
    from orbaxkit.errors import CheckpointWarning, shown
    from orbaxkit.optimizer.zeroing import plan_zeroing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # writing opens it again and warns then
        ckpt = open_checkpoint(args.source, step=args.step, item=args.item)
        zeroing = plan_zeroing(
            ckpt.specs,
            tuple(args.keep),
            None if args.only is None else tuple(args.only),
            at=args.at,
            allow_bias_mismatch=args.allow_bias_mismatch,
            where=ckpt.path,
        )
    for note in zeroing.notes:
        print(f"note: {shown(note)}", file=sys.stderr)
    return write(args, [zeroing])
