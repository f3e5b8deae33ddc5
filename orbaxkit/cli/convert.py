"""`orbaxkit convert`: a checkpoint to a new one on disk, in bounded memory."""

import argparse
import json
from typing import Any

from orbaxkit.cli.rules import add_rules

EXAMPLES = """\
examples:
  orbaxkit convert runs/pi0 params --select 'params/**' --cast bfloat16
  orbaxkit convert bert_model.ckpt bert.safetensors --recipe bert_hf
  orbaxkit convert runs/pi0/20000 hf/ --format safetensors --select 'params/**' --unstack 'params/layers=layers_{i}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `convert`."""
    parser.epilog = EXAMPLES
    parser.add_argument("source", metavar="SRC", help="a checkpoint, a step, an item, or the root of a run")
    parser.add_argument("destination", metavar="DST", help="where the new checkpoint goes; must not exist")
    add_rules(parser)
    parser.add_argument(
        "--format", choices=["orbax", "safetensors"], help="default: by the destination's name, else orbax"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="split safetensors files at this size")
    add_writing(parser)


def add_writing(parser: argparse.ArgumentParser) -> None:
    """What every command that writes a checkpoint takes."""
    parser.add_argument("--memory-limit", metavar="SIZE", help="bytes of arrays to hold at most, like 2GB")
    parser.add_argument("--item", metavar="NAME", help="only this item of the step")
    parser.add_argument("--step", type=int, metavar="N", help="this step of a run (default: the latest finished one)")
    parser.add_argument("--as-step", type=int, metavar="N", help="write DST/N/default, a step of an Orbax run")
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new checkpoint is whole")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the bytes, and write nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Convert, and print where it is."""
    from orbaxkit.cli.rules import transforms_of

    return write(args, transforms_of(args.rules), args.format, args.max_shard_size)


def write(args: argparse.Namespace, transforms: list[Any], format: str | None = None, shard: str = "5GB") -> int:
    """Write what the transforms make of the source, or show the plan; print the result."""
    import warnings

    from orbaxkit._convert import convert
    from orbaxkit.cli.messages import warn_on_stderr
    from orbaxkit.cli.progress import reporting
    from orbaxkit.cli.signals import terminable

    with warnings.catch_warnings():
        warnings.showwarning = warn_on_stderr
        if args.dry_run:
            return _show_plan(args, transforms)
        with terminable(), reporting("writing") as progress:
            path = convert(
                args.source,
                args.destination,
                *transforms,
                format=format,  # type: ignore[arg-type]
                memory_limit=args.memory_limit,
                progress=progress,
                overwrite=args.overwrite,
                as_step=args.as_step,
                max_shard_size=shard,
                item=args.item,
                step=args.step,
            )
    print(json.dumps({"path": str(path)}) if args.json else path)
    return 0


def _show_plan(args: argparse.Namespace, transforms: list[Any]) -> int:
    from orbaxkit._checkpoint import open_checkpoint
    from orbaxkit.planning import make_plan

    plan = make_plan(open_checkpoint(args.source, step=args.step, item=args.item).specs, *transforms)
    if args.json:
        print(json.dumps({**plan.to_json(), "read_bytes": plan.read_bytes, "output_bytes": plan.specs.nbytes}))
    else:
        print(plan)
        print(f"to be written: {len(plan.outputs):,} leaves, {plan.specs.nbytes:,} bytes decoded")
    return 0
