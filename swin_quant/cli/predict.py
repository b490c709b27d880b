"""swin-quant predict."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import deployed, options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.tasks.predict import Answering, Predictions

SCHEMA = "swin-quant/predictions/1"
HELP = """Classify pictures: the five most probable classes of each, from a checkpoint or an artifact on any engine.
With --output it writes Parquet files, under torchrun shared among processes, and goes on where it was cut off."""
EXAMPLES = """examples:
  swin-quant predict out/my_calib.pth cat.jpg                              (INT8 as its run card says)
  swin-quant predict swin_tiny_patch4_window7_224.pth cat.jpg
  swin-quant predict out/my_int8.onnx holiday 'more/*.png' --engine openvino --json answers.json
  torchrun --nproc_per_node 2 -m swin_quant predict out/my_int8.onnx archive --threads 1 --output answers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint or artifact; its run card lies beside it")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders, 'patterns'")
    group = parser.add_argument_group("model")
    options.add_config(group)
    options.add_head(group)
    options.add_policy(parser)
    deployed.add_engines(parser)
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--labels", metavar="FILE", help="class names, one a line (default: the model's own, ImageNet's)"
    )
    group.add_argument("--output", metavar="DIR", help="write Parquet files there, --shard pictures each, and no table")
    deployed.add_shard(group)
    group.add_argument("--top", type=whole, default=5, metavar="N", help="classes a picture (default 5)")
    deployed.add_loading(group)
    options.add_json(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.progress import log
    from swin_quant.data.named import NamedPictures
    from swin_quant.tasks.predict import predict
    from swin_quant.tasks.predict_shards import Answers, predict_shards

    if not args.output:
        deployed.refuse_ranks(world, "predict without --output")
    if args.output and args.json:
        raise UsageError("--output and --json: choose one, Parquet files or JSON")
    if args.shard and not args.output:
        raise UsageError("--shard: is for --output")
    if args.top < 1:
        raise UsageError(f"--top {args.top}: must be at least 1")
    pictures = NamedPictures(args.images)
    by = (_of_checkpoint if deployed.is_checkpoint(args.model) else _of_artifact)(args, world)
    if args.output:
        asked = Answers(args.top, args.labels, args.batch, args.workers)
        manifest = predict_shards(by, pictures, deployed.sharding_of(args, args.output), asked, world)
        if world.is_main:
            print(manifest)
        return
    found = predict(by, pictures, args.top, args.labels, args.batch, args.workers)
    for why in found.unreadable.values():
        log.warning("skipped: %s", why)
    _write(args.json, by, found)


def _of_artifact(args: argparse.Namespace, world: World) -> Answering:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.tasks.predict import answering_artifact

    artifact = open_artifact(args.model)
    if args.cfg or args.policy or options.model_keys(args):
        raise UsageError(
            "--cfg, --policy, --weights, --img-size, --window: are for checkpoints: an artifact has a run card"
        )
    return answering_artifact(artifact, args.engines, deployed.engine_options(args, world))


def _of_checkpoint(args: argparse.Namespace, world: World) -> Answering:
    """Quantized as --policy or the card says, else in float."""
    from swin_quant.config.outputs import need_logits
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.loading import load_for_scoring
    from swin_quant.tasks.predict import answering_model

    if args.engines:
        raise UsageError("--engine is for artifacts: export the checkpoint, then name that")
    args.checkpoint = args.model
    cfg = options.config_of(args)
    args.model = args.checkpoint
    need_logits(cfg, "predict")
    subject = load_for_scoring(cfg, args.model, options.policies_of(args), world, args.replace_head)
    preprocess = Preprocess.from_dict(subject.card.preprocess)
    if preprocess.size != cfg.DATA.IMG_SIZE:
        raise SwinQuantError(
            f"{args.model}: its run card resizes pictures to {preprocess.size}, the model takes {cfg.DATA.IMG_SIZE}"
        )
    name, classes = Path(args.model).name, cfg.MODEL.NUM_CLASSES
    record = subject.card.checkpoint or subject.card.source
    sha256 = record["sha256"] if record else None
    return answering_model(subject.model, name, preprocess, classes, subject.policies, sha256, subject.card.class_names)


def _write(target: str | None, by: Answering, found: Predictions) -> None:
    from swin_quant.report.predictions import table_of
    from swin_quant.report.table import print_table

    answers = found.answers.items()
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": by.name,
        "engine": by.engine.name,
        "precision": by.engine.precision,
        "policy": by.engine.policy,
        "pictures": [{"picture": name, "classes": [asdict(guess) for guess in top]} for name, top in answers],
        "unreadable": found.unreadable,
    }
    if target != "-":
        best = {name: [(guess.probability, guess.index, guess.name) for guess in top] for name, top in answers}
        print_table(table_of(best, f"{by.name}: {by.engine.label} on {by.engine.name}"))
    if target:
        put(target, json.dumps(content, indent=2))
