"""swin-quant evaluate."""

import argparse
from dataclasses import replace
from pathlib import Path

from swin_quant.cli import options
from swin_quant.cli.output import output_dir, print_table
from swin_quant.distributed import World
from swin_quant.errors import UsageError
from swin_quant.files import ensure_writable_dir
from swin_quant.progress import log
from swin_quant.runcard import RunCard
from swin_quant.scoring import load_for_scoring, score_model

HELP = "Score a checkpoint on labelled pictures: float32 first, half precision, and INT8 if it is calibrated."
EXAMPLES = """examples:
  swin-quant evaluate --cfg my.yaml --resume out/my_calib.pth --data-path imagenet      (policy of its run card)
  swin-quant evaluate --cfg my.yaml --resume out/my_calib.pth --data-path data --zip --policy ft-mode1 ft-mode2 qdq
  swin-quant evaluate --cfg my.yaml --resume my.pth --data-path imagenet                (a float checkpoint)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_data(parser)
    options.add_policy(parser)
    options.add_run(parser)
    parser.add_argument("--split", default="val", help="pictures to score (default val)")


def run(args: argparse.Namespace, world: World) -> None:
    if not args.resume:
        raise UsageError("no checkpoint: give --resume FILE")
    cfg = options.config_of(args)
    subject = load_for_scoring(cfg, args.resume, options.policies_of(args), world, args.replace_head)
    path = subject.card_file or output_dir(cfg) / f"{cfg.MODEL.NAME}_eval.json"
    ensure_writable_dir(path.parent)
    card = subject.card if subject.card_file else _with_earlier_results(subject.card, path)
    card = score_model(subject.model, cfg, card, subject.policies, world, args.split, args.half, args.max_unreadable)
    if world.is_main:
        card.write(path)
        log.info("run card: %s", path)
        print_table([card])


def _with_earlier_results(card: RunCard, path: Path) -> RunCard:
    """A new card with the results that `path` holds of the same weights under the same preprocessing."""
    earlier = RunCard.read(path) if path.exists() else card
    same = (earlier.source, earlier.preprocess) == (card.source, card.preprocess)
    return replace(card, results=earlier.results) if same else card
