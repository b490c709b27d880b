"""swin-quant quantize."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.backends.registry import targets
from swin_quant.base.errors import UsageError
from swin_quant.cli import deployed, options
from swin_quant.cli.flags import add_flags
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import output_dir, show
from swin_quant.cli.shared import one_process
from swin_quant.verbs.search import BudgetOptions

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.tasks.quantization import Quantization

AUTO, MAX_DROP = "auto", 0.1
# Command -> the options that it shares with this one, beside those that every run of it has.
HANDED_ON = {
    "calibrate": ("--cfg", "--weights", "--img-size", "--window", "--opts", "--cache-mode", "--batch", "--workers",
                  "--max-unreadable", "--split", "--calibrator", "--percentile", "--exact-histogram", "--device",
                  "--seed", *options.POLICY_CHANGES),
    "search": ("--batch", "--workers", "--max-unreadable", "--split", "--threads", "--float-type", "--rounds",
               "--seconds", "--device", "--seed"),
    "export": options.POLICY_CHANGES,
    "verify": ("--workers", "--max-unreadable", "--threads", "--float-type", "--device"),
    "evaluate": ("--cache-mode", "--batch", "--workers", "--max-unreadable", "--half", "--threads", "--float-type",
                 "--device"),
}  # fmt: skip
DESTS = {"--split": "calib_split"}
DEFAULTS = {"--half": "auto", "--device": "auto", "--max-unreadable": 0.01}
HELP = "From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."
EXAMPLES = """examples:
  swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
  swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out
  swin-quant quantize my.pth --cfg my.yaml --data-path data --for onnxruntime --pictures 160 --dry-run
  swin-quant quantize my.pth --data-path imagenet --for openvino --policy cpu --off role:one_sided_input --output out
  swin-quant quantize my.pth swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output family

It goes on where it was cut off: a step whose result lies in the output folder is not done again. Of several
checkpoints, each has a folder of its name below --output, one that fails does not stop the others, and one table shows
them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(
        parser, "float or calibrated: Microsoft's, timm's, Hugging Face's, ours", head=False, several=True
    )
    parser.add_argument("--for", dest="backend", required=True, choices=tuple(targets()), help="what is to run it")
    options.add_output(parser)
    options.add_data(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument("--pictures", type=whole, metavar="N", help="how many calibrate (default 80)")
    group.add_argument("--split", dest="calib_split", metavar="SPLIT", help="pictures to sample (default train)")
    options.add_calibrator(parser)
    options.add_passes(parser)
    options.add_policy(parser, "the backend's best; auto: found by `search`")
    add_flags(parser.add_argument_group("budget"), BudgetOptions)
    parser.add_argument("--threads", type=whole, metavar="N", help="of the engine (default: its own choice)")
    parser.add_argument("--float-type", choices=("float32", "bfloat16", "float16"),
                        help="what is not int8, where there is a choice (default float32; GPUs float16)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, metavar="N", help="of timing, by --policy auto (default 5)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of each round (default 0.5)")
    parser.add_argument("--dry-run", action="store_true", help="print the steps, as commands, and do nothing")
    options.add_json(parser)
    options.add_run(parser)
    parser.set_defaults(calib_augment=False)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.tasks.quantize import quantize_all, steps

    one_process(world, "quantize")
    if not args.checkpoint:
        raise UsageError("no checkpoint: name a float or a calibrated one")
    names = [args.checkpoint] if isinstance(args.checkpoint, str) else args.checkpoint
    asked = {one.cfg.MODEL.NAME: one for one in (_asked(args, world, name, len(names) > 1) for name in names)}
    if len(asked) < len(names):
        raise UsageError("two checkpoints have one name, which would be their folder's: quantize them one by one")
    if args.dry_run:
        for one in asked.values():
            for step in steps(one):
                print(step.command + ("    # done" if step.is_done() else ""))
        return
    made, failed = quantize_all(asked)
    scored = [artifact.card for artifact in made.values() if artifact.card.results]
    if scored:
        show(scored, args.json)
    for artifact in made.values():
        if not artifact.card.results:
            print(artifact.file)
    if failed:
        raise failed[0]


def _asked(args: argparse.Namespace, world: World, checkpoint: str, several: bool) -> Quantization:
    from swin_quant.quant.search import Budget
    from swin_quant.tasks.quantization import Quantization
    from swin_quant.verbs.calibrate import BATCH, CalibrationPlan

    args.checkpoint = checkpoint
    cfg = options.config_of(args)
    automatic = args.policy == [AUTO]
    budget = Budget(args.max_drop, args.min_agreement, args.min_sqnr)
    limited = budget != Budget() or args.max_ms is not None
    if limited and not automatic:
        raise UsageError(f"a budget is for --policy {AUTO}: other policies are what they are")
    timing = {key: value for key in ("rounds", "seconds") if (value := getattr(args, key)) is not None}
    if timing and not automatic:
        raise UsageError(f"--{next(iter(timing))} is for --policy {AUTO}: nothing is timed for other policies")
    if automatic and not limited:
        budget = Budget(max_drop=MAX_DROP)
    if automatic and (idle := _words(args, options.POLICY_CHANGES)):
        raise UsageError(f"--policy {AUTO}: {idle} is for a policy with a name: calibrate, then `search --policy NAME` "
                         "with it")  # fmt: skip
    return Quantization(
        args.checkpoint,
        cfg,
        args.backend,
        Path(args.output or "output") / cfg.MODEL.NAME if several else Path(output_dir(args, cfg)),
        None if automatic else options.policy_of(args),
        CalibrationPlan.of(
            args.pictures,
            min(args.batch or BATCH, BATCH),
            split=args.calib_split or "train",
            seed=cfg.SEED,
            method=options.method_of(args),
            max_unreadable=args.max_unreadable,
            passes=options.passes_of(args),
        ),
        args.saturation_safe,
        deployed.engine_options(args, world),
        budget,
        args.max_ms,
        args.batch or 1,
        args.half,
        args.policy[0] if args.policy and not automatic else None,
        {verb: _words(args, flags) for verb, flags in HANDED_ON.items()},
        **timing,
    )


def _words(args: argparse.Namespace, flags: Sequence[str]) -> str:
    """Those of `flags` that were given, as they are written."""
    words: list[str] = []
    for flag in flags:
        value = getattr(args, DESTS.get(flag, flag.strip("-").replace("-", "_")))
        if value is not None and value is not False and value != DEFAULTS.get(flag):  # 0 is none of these
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [flag, *(shlex.quote(str(one)) for one in values)]
    return " ".join(words)
