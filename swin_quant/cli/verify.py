"""swin-quant verify."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import deployed
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.cards.records import VerificationRecord

DEFAULT_COUNT = 64
HELP = "Compare an artifact with the checkpoint it was exported from, on real pictures: pass or fail for each engine."
EXAMPLES = """examples:
  swin-quant verify out/my_int8.onnx --data-path imagenet
  swin-quant verify out/my_int8.onnx --engine openvino --pictures cat.jpg 'holiday/*.jpg' --resume out/my_calib.pth

A quantized artifact passes when its mean |Δlogit| against fake-quant is below the engine's tolerance, a float one when
that against the float model is. Exit code 1 says that an engine failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported file; its run card lies beside it")
    parser.add_argument("--resume", metavar="FILE", help="its checkpoint (default: looked for beside it and one up)")
    parser.add_argument("--count", type=whole, default=DEFAULT_COUNT, metavar="N",
                        help=f"pictures, evenly spread over those there are (default {DEFAULT_COUNT})")  # fmt: skip
    deployed.add_engines(parser)
    deployed.add_pictures(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.base.progress import log
    from swin_quant.cards.paths import card_path
    from swin_quant.report.screen import print_table
    from swin_quant.report.verification import table_of
    from swin_quant.tasks.verify import failures

    deployed.refuse_ranks(world, "verify")
    if args.count < 1:
        raise UsageError(f"--count {args.count}: must be at least 1")
    artifact = open_artifact(args.artifact)
    records = _verify(artifact, args, world)
    card = artifact.card
    for record in records:
        card = card.with_verification(record)
    replace(artifact, card=card).card.write(card_path(artifact.file))
    log.info("run card: %s", card_path(artifact.file))
    print_table(table_of(records))
    if failed := failures(records):
        raise SwinQuantError(f"{artifact.file}: verification failed: {'; '.join(failed)}")


def _verify(artifact: Artifact, args: argparse.Namespace, world: World) -> list[VerificationRecord]:
    from swin_quant.engines.baseline import Baseline, engines_beside
    from swin_quant.engines.infer import infer
    from swin_quant.tasks.deployed import (
        config_of,
        find_checkpoint,
        load_engines,
        load_origin,
        names_of_engines,
        no_checkpoint,
        preprocess_of,
    )
    from swin_quant.tasks.verify import compare, is_quantized

    names = names_of_engines(artifact, args.engines)
    cfg, preprocess = config_of(artifact), preprocess_of(artifact)
    checkpoint = find_checkpoint(artifact, args.resume)
    if checkpoint is None:
        raise SwinQuantError(f"{artifact.file}: nothing to compare with: {no_checkpoint(artifact)}")
    pictures = deployed.pictures_of(args)
    origin = load_origin(artifact, cfg, checkpoint, world)
    policies = origin.policies if is_quantized(artifact.record["precision"]) else ()
    trained = Baseline() if artifact.card.is_qat else None  # whose float model is not the original, and not called so
    references = engines_beside(origin.model, world.device, None, policies, trained)
    engines = load_engines(artifact, names, deployed.engine_options(args, world))
    inferred = infer(
        references | engines,
        pictures,
        preprocess,
        cfg.MODEL.NUM_CLASSES,
        batch_size=args.batch_size,
        workers=args.workers,
        count=args.count,
        max_unreadable=args.max_unreadable,
        device=world.device,
    )
    float_type = artifact.record["options"].get("float_type")
    return compare(engines, dict(zip(engines, names, strict=True)), references, inferred, float_type)
