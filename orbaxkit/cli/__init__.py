"""The `orbaxkit` command.

A verb is a module `orbaxkit.cli.<verb>` with two functions and a line in `VERBS`:

    def add_arguments(parser: argparse.ArgumentParser) -> None     # arguments; parser.epilog holds two real examples
    def run(args: argparse.Namespace) -> int                       # prints data to stdout, returns the exit code

Only the module of the verb that was asked for is imported, so that `inspect` stays light. Data goes to stdout; errors,
hints and progress to stderr. Exit codes: 0 ok, 1 a difference or a failed check, 2 usage or something unreadable.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

VERBS = {
    "inspect": "show what a checkpoint holds, from its metadata alone",
    "diff": "compare two checkpoints: structure, shapes, dtypes, and if asked every value",
    "convert": "write what transforms make of a checkpoint as a new one, in bounded memory",
    "reset-optimizer": "write a checkpoint with its optimizer started again",
    "verify": "read all of a checkpoint and say what is missing, cut short or cannot be decoded",
    "match": "propose the rules that turn one checkpoint into another",
    "tour": "see the main jobs at work, on a small checkpoint made on the spot or on yours",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a key that the terminal cannot show must not end the listing
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser(argv)
    try:
        args = parser.parse_args(argv)
        code = _module(args.verb).run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _fail(error)
    return int(code)


def _module(verb: str) -> Any:
    return import_module(f"orbaxkit.cli.{verb.replace('-', '_')}")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orbaxkit", description="See, restore and reshape Orbax checkpoints.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for verb, purpose in VERBS.items():
        sub = verbs.add_parser(
            verb,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if verb == asked:
            _module(verb).add_arguments(sub)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from orbaxkit import __version__

        print(f"orbaxkit {__version__}")
        parser.exit()


def _fail(error: Exception) -> int:
    """Say what went wrong in one message; a traceback only for our own mistakes."""
    from orbaxkit.errors import OrbaxkitError, shown

    if not isinstance(error, OrbaxkitError | OSError):
        raise error
    print(f"error: {error if isinstance(error, OrbaxkitError) else shown(error)}", file=sys.stderr)
    return 2


def _close_stdout() -> None:
    """Whoever read our output has gone: keep the interpreter from complaining about that when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
