"""swin-quant search."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import deployed, options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import output_dir, put
from swin_quant.cli.shared import one_process
from swin_quant.quant.names import SEARCHED_ON

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Find the policy that keeps the loss within a budget at the least latency, by measuring both; writes it as YAML."
EXAMPLES = """examples:
  swin-quant search out/my_calib.pth --data-path imagenet --engine openvino --max-drop 0.1 --output out
  swin-quant search out/my_calib.pth --data-path data --engine onnxruntime --min-sqnr 35 --batch 8 --output out
  swin-quant export out/my_calib.pth --for openvino --policy out/my_auto_openvino.yaml --output out   (what it found)

It goes on where it was cut off. The drop is expected from the float model's own probabilities where the two disagree:
no labels are needed. It counts with two standard errors, and twice on training pictures, which a network is surer of
than of others. Exit code 1 says that the budget cannot be met; the best that was found is written even so."""
SPLIT = "train"


def add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budget")
    group.add_argument("--max-drop", type=float, metavar="POINTS", help="expected drop of top-1 accuracy")
    group.add_argument("--min-agreement", type=float, metavar="PERCENT", help="top-1 agreement with float")
    group.add_argument("--min-sqnr", type=float, metavar="DB", help="SQNR of the logits")
    group.add_argument("--max-ms", type=float, metavar="MS", help="of a batch on the engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "calibrated checkpoint", head=False)
    parser.add_argument("--engine", required=True, metavar="NAME",
                        help="what latency is measured on; fastertransformer: which of its modes, without")  # fmt: skip
    add_budget(parser)
    options.add_data(parser, half=False)
    parser.add_argument("--pictures", type=whole, default=SEARCHED_ON, metavar="N",
                        help=f"how many (default {SEARCHED_ON})")  # fmt: skip
    parser.add_argument("--split", default=SPLIT, help=f"pictures to draw them from (default {SPLIT})")
    options.add_policy(parser)
    parser.add_argument("--threads", type=whole, metavar="N", help="of the engine (default: its own choice)")
    parser.add_argument("--float-type", choices=("float32", "bfloat16", "float16"),
                        help="what is not int8, where there is a choice (default float32; GPUs float16)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, default=5, metavar="N", help="of timing (default 5)")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of each round (default 0.5)")
    options.add_output(parser)
    options.add_json(parser)
    options.add_run(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.quant.search import Budget
    from swin_quant.report.costs import search_json, search_table
    from swin_quant.report.table import print_table
    from swin_quant.tasks.measuring import Measuring
    from swin_quant.tasks.search import PolicySearch, search
    from swin_quant.tasks.sensitivity import Sampling

    one_process(world, "search")
    if not args.checkpoint:
        raise UsageError("nothing to search for: name a calibrated checkpoint")
    batch = 1 if args.batch is None else args.batch
    args.batch = None  # of the engine; pictures are measured as many at a time as fit
    cfg = options.config_of(args)
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: the layers of one policy are switched")
    of = Measuring(
        cfg,
        args.checkpoint,
        args.engine,
        Path(output_dir(args, cfg)),
        policies[0] if policies else None,
        batch,
        Sampling(args.pictures, args.split, cfg.SEED + 1, max_unreadable=args.max_unreadable),
        deployed.engine_options(args, world),
        args.rounds,
        args.seconds,
    )
    budget = Budget(args.max_drop, args.min_agreement, args.min_sqnr)
    asked = PolicySearch(of, budget, args.max_ms)
    result = search(asked)
    if args.json:
        put(args.json, search_json(result))
    if args.json != "-":
        print_table(search_table(result, asked.limits, f"{args.engine}, batch {batch}"))
    if not result.met:
        raise SwinQuantError(f"the budget cannot be met ({asked.limits}): the best that was found is {result.file}")
