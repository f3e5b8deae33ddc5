"""`orbaxkit inspect`: what a checkpoint holds, from its metadata alone."""

import argparse

EXAMPLES = """\
examples:
  orbaxkit inspect runs/pi0 --step 20000 --depth 3
  orbaxkit inspect runs/pi0 --select 'params/**/kernel' --json | jq '.items[].parameters'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `inspect`."""
    parser.epilog = EXAMPLES
    parser.add_argument("path", metavar="PATH", help="a checkpoint, a step, an item, or the root of a run")
    parser.add_argument("--depth", type=_positive, metavar="N", help="levels to show (default: what fits sixty lines)")
    parser.add_argument("--select", metavar="PATTERN", help="only leaves whose path matches, like 'params/**/kernel'")
    parser.add_argument("--item", metavar="NAME", help="only this item of the step")
    parser.add_argument("--step", type=int, metavar="N", help="this step of a run (default: the latest finished one)")
    parser.add_argument("--sort", choices=["size"], help="order siblings by size, largest first")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON, leaf by leaf")
    forms.add_argument("--values", action="store_true", help="also read optimizer states and tell what looks wrong")


def run(args: argparse.Namespace) -> int:
    """Print a table, or JSON."""
    import gc
    import warnings

    from orbaxkit.cli.messages import warn_on_stderr
    from orbaxkit.errors import CheckpointWarning

    gc.disable()  # nothing here is garbage, and looking for some doubles the time of a large listing
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn_on_stderr
            # The table shows them among its notes.
            warnings.simplefilter("always" if args.json else "ignore", CheckpointWarning)
            print(_text(args))
    finally:
        gc.enable()
    return 0


def _text(args: argparse.Namespace) -> str:
    from orbaxkit._checkpoint import open_checkpoint

    checkpoint = open_checkpoint(args.path, step=args.step, item=args.item)
    if args.json:
        from orbaxkit.display.json import dump, to_json

        return dump(to_json(checkpoint, select=args.select))
    from orbaxkit.display.table import render

    table = render(checkpoint, depth=args.depth, select=args.select, sort=args.sort)
    return f"{table}\n\n{checkpoint.describe(values=True)}" if args.values else table


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a depth is at least 1")
    return number
