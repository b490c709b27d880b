"""swin-quant evaluate."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir, one_at_a_time
from swin_quant.cli import deployed, options
from swin_quant.cli.deployed import is_checkpoint
from swin_quant.cli.output import output_dir, put, show

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.base.shards import Sharding
    from swin_quant.cards.card import RunCard
    from swin_quant.loading import Subject
    from swin_quant.score.baseline import Baseline

HELP = "Score a checkpoint, or artifacts on their engines, on labelled pictures: the float model first."
EXAMPLES = """examples:
  swin-quant evaluate out/my_calib.pth --data-path imagenet                             (policy of its run card)
  swin-quant evaluate out/my_calib.pth --data-path data --policy ft-mode1 ft-mode2 qdq
  swin-quant evaluate my.pth --cfg my.yaml --data-path imagenet                         (a float checkpoint)
  swin-quant evaluate out/my_int8.onnx --data-path imagenet                             (every engine installed)
  swin-quant evaluate out/my_int8.onnx out/my_fp32.onnx --engine openvino --data-path data
  swin-quant evaluate out/my_int8.onnx --data-path imagenet --answers answers           (Parquet; goes on if cut off)
  torchrun --nproc_per_node 2 -m swin_quant evaluate out/my_int8.onnx --data-path imagenet --threads 1 --answers two"""
_OF_CHECKPOINTS = ("cfg", "opts", "policy", "wprec", "aprec", "quant_per_tensor", "narrow_range", "saturation_safe",
                   "off", "replace_head", "output")  # fmt: skip
_OF_ARTIFACTS = ("engines", "threads", "float_type", "fake_quant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="a checkpoint, or artifacts: their run cards tell")
    group = parser.add_argument_group("model")
    group.add_argument("--checkpoint", metavar="FILE",
                       help="to score, or what the artifacts were made from (default: looked for)")  # fmt: skip
    options.add_config(group)
    options.add_head(group)
    options.add_data(parser)
    options.add_policy(parser)
    deployed.add_engines(parser)
    options.add_original(parser)
    options.add_run(parser)
    options.add_output(parser)
    options.add_json(parser)
    parser.add_argument("--split", default="val", help="pictures to score (default val)")
    parser.add_argument("--all", action="store_true", help="show what the run card has of before, too")
    group = parser.add_argument_group("answers to each picture")
    group.add_argument("--answers", metavar="DIR", help="write them there as Parquet, and go on if cut off")
    deployed.add_shard(group)
    parser.add_argument("--fake-quant", action="store_true", help="score the simulation beside an artifact")


def run(args: argparse.Namespace, world: World) -> RunCard | None:
    """Returns the card of a checkpoint that was scored."""
    files = getattr(args, "files", [])  # main.py has no such option
    if len(files) == 1 and is_checkpoint(files[0]):
        if args.checkpoint:
            raise UsageError(f"{files[0]} and --checkpoint {args.checkpoint} are both checkpoints: give one of them")
        args.checkpoint, files = files[0], []
    args.files = files
    kind, others = ("artifacts", _OF_CHECKPOINTS) if files else ("checkpoints", _OF_ARTIFACTS)
    if wrong := [name for name in others if getattr(args, name, None)]:
        flag = {"engines": "engine"}.get(wrong[0], wrong[0]).replace("_", "-")
        more = "their run cards say that" if files else "name an artifact"
        raise UsageError(f"--{flag} is not for {kind}: {more}")
    return (_run_artifacts if files else _run_checkpoint)(args, world)


def _run_artifacts(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.tasks.evaluate_artifacts import Scoring, score_artifacts, write_cards

    scoring = Scoring(
        args.engines,
        deployed.engine_options(args, world),
        deployed.overrides_of(args),
        args.checkpoint,
        args.split,
        args.half,
        args.fake_quant,
        args.max_unreadable,
        args.original,
        _answers(args),
    )
    artifacts = [open_artifact(path) for path in dict.fromkeys(args.files)]
    scored = score_artifacts(artifacts, scoring, world)
    if world.is_main:
        written = write_cards(scored)
        pairs = zip(scored, artifacts, strict=True)
        show(written if args.all else [one.card.since(before.card) for one, before in pairs], args)


def _run_checkpoint(args: argparse.Namespace, world: World) -> RunCard:
    from swin_quant.base.progress import log
    from swin_quant.config.outputs import LOGITS
    from swin_quant.loading import load_for_scoring
    from swin_quant.tasks.evaluate import compared, score_model

    if not args.checkpoint:
        raise UsageError("nothing to score: name a checkpoint or an artifact")
    cfg = options.config_of(args)
    subject = load_for_scoring(cfg, args.checkpoint, options.policies_of(args), world, args.replace_head)
    options.tell_bits(subject.policies)
    path = subject.card_file or output_dir(args, cfg) / f"{cfg.MODEL.NAME}_eval.json"
    ensure_writable_dir(path.parent)
    card, baseline = compared(subject, cfg, world, args.original)
    if cfg.MODEL.OUTPUT_KIND != LOGITS:
        _show_features(args, subject, cfg, card, baseline, world)
        return card
    card = card if subject.card_file else _with_earlier_results(card, path)
    how = (subject.policies, world, args.split, args.half, args.max_unreadable, baseline)
    before, card = card, score_model(subject.model, cfg, card, *how, _answers(args))
    if world.is_main:
        measured, card = card.since(before), _kept(subject, before, card, path)
        log.info("run card: %s", path)
        show([card if getattr(args, "all", False) else measured], args)
    return card


def _kept(subject: Subject, before: RunCard, scored: RunCard, path: Path) -> RunCard:
    """The card at `path`, with what was measured between `before` and `scored`; others may have written to it since."""
    from swin_quant.cards.records import Result
    from swin_quant.cards.update import update, with_results

    results = [Result.of(record) for record in scored.since(before).results]
    if subject.card_file:
        return update(path, before, lambda card: with_results(card, results))
    with one_at_a_time(path.parent):
        card = with_results(_with_earlier_results(before, path), results)
        card.write(path)
    return card


def _show_features(
    args: argparse.Namespace, subject: Subject, cfg: CfgNode, card: RunCard, baseline: Baseline | None, world: World
) -> None:
    from swin_quant.report.table import json_text
    from swin_quant.tasks.evaluate_features import score_features

    if getattr(args, "answers", None):
        raise UsageError("--answers is for classifiers: maps and embeddings name no class")
    how = (subject.policies, world, args.split, args.half, args.max_unreadable, baseline)
    scores = score_features(subject.model, cfg, card, *how)
    if args.json != "-":
        print(*scores, sep="\n")
    if args.json:
        put(args.json, json_text([score.to_dict() for score in scores]))


def _answers(args: argparse.Namespace) -> Sharding | None:
    """main.py has no such option."""
    folder = getattr(args, "answers", None)
    if folder is None and getattr(args, "shard", None) is not None:
        raise UsageError("--shard: is for --answers")
    return deployed.sharding_of(args, folder) if folder else None


def _with_earlier_results(card: RunCard, path: Path) -> RunCard:
    """A new card with the results that `path` holds of the same weights under the same preprocessing."""
    from swin_quant.tasks.evaluate import sha256_in

    earlier = card.read(path) if path.exists() else card
    same = earlier.preprocess == card.preprocess and all(
        sha256_in(one) == sha256_in(other)
        for one, other in ((earlier.source, card.source), (earlier.checkpoint, card.checkpoint))
    )
    return replace(card, results=earlier.results) if same else card
