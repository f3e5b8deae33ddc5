"""`orbaxkit match`: the rules between two checkpoints, proposed."""

import argparse
import json

EXAMPLES = """\
examples:
  orbaxkit match params hf/model.safetensors
  orbaxkit match params hf/model.safetensors --values --transform rules.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `match`."""
    parser.epilog = EXAMPLES
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="what it is to become")
    parser.add_argument("--values", action="store_true", help="both hold the same values: take only what they prove")
    parser.add_argument("--transform", metavar="FILE", help="write the rules as JSON, for `convert --plan FILE`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the rules; 1 if some arrays have no partner."""
    import warnings

    from orbaxkit._match import match
    from orbaxkit.cli.messages import warn_on_stderr

    with warnings.catch_warnings():
        warnings.showwarning = warn_on_stderr
        found = match(args.a, args.b, values=args.values)
    if args.transform:
        with open(args.transform, "x", encoding="utf-8") as file:
            json.dump(found.to_json()["transform"], file, indent=1)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 1 if found.only_in_a or found.only_in_b else 0
