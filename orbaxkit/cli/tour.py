"""`orbaxkit tour`: the main jobs at work, on a small checkpoint made on the spot or on the user's own."""

import argparse
import sys

EXAMPLES = """\
examples:
  orbaxkit tour
  orbaxkit tour runs/pi0/20000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tour`."""
    parser.epilog = EXAMPLES
    parser.add_argument("path", metavar="PATH", nargs="?", help="your own checkpoint, which is only read")


def run(args: argparse.Namespace) -> int:
    """Print the tour's lines as they come."""
    import warnings

    from orbaxkit._tour import tour
    from orbaxkit.cli.messages import warn_on_stderr

    with warnings.catch_warnings():
        warnings.showwarning = warn_on_stderr
        for line in tour(args.path, progress=_say):
            print(line, flush=True)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
