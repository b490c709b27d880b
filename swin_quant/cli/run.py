"""swin-quant run."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cli import deployed

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.engines.infer import Inferred

HELP = "Run an artifact on pictures and write its logits for other programs."
EXAMPLES = """examples:
  swin-quant run out/my_int8.onnx --data-path imagenet --output out
  swin-quant run out/my_int8.onnx --engine openvino --images 'holiday/*.jpg' --output out

numpy.load("out/my_int8_logits.npz") holds: names, text [N]; logits, float32 [N, classes]; top1, int64 [N];
labels, int64 [N], -1 where there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported file; its run card lies beside it")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for <ARTIFACT>_logits.npz")
    deployed.add_engines(parser)
    deployed.add_pictures(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.base.progress import log
    from swin_quant.engines.infer import infer
    from swin_quant.tasks.deployed import config_of, load_engines, names_of_engines, preprocess_of

    deployed.refuse_ranks(world, "run")
    output = Path(args.output) / f"{Path(args.artifact).stem}_logits.npz"
    artifact = open_artifact(args.artifact)
    names = names_of_engines(artifact, args.engines)[: None if args.engines else 1]
    if len(names) > 1:
        raise UsageError("--engine: run takes one engine")
    cfg = config_of(artifact)
    pictures = deployed.pictures_of(args)
    ensure_writable_dir(output.parent)
    engines = load_engines(artifact, names, deployed.engine_options(args, world))
    inferred = infer(
        engines,
        pictures,
        preprocess_of(artifact),
        cfg.MODEL.NUM_CLASSES,
        batch_size=args.batch,
        workers=args.workers,
        max_unreadable=args.max_unreadable,
        device=world.device,
    )
    if inferred.unreadable:
        log.warning("left out, unreadable: %s", listed(inferred.unreadable))
    atomic_write_bytes(output, _npz(inferred))
    log.info("%d pictures, %s: %s", len(inferred.names), names[0], output)


def _npz(inferred: Inferred) -> memoryview:
    import numpy as np

    (logits,) = inferred.logits.values()
    content = io.BytesIO()
    np.savez(
        content,
        names=np.array(inferred.names),
        logits=logits.numpy(),
        top1=logits.argmax(1).numpy(),
        labels=inferred.labels.numpy(),
    )
    return content.getbuffer()
