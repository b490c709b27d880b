"""swin-quant predict."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import deployed, options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.data.named import NamedPictures
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.engines.engine import Engine
    from swin_quant.tasks.predict import Guess

SCHEMA = "swin-quant/predictions/1"
HELP = "Classify pictures: the five most probable classes of each, from a checkpoint or an artifact on any engine."
EXAMPLES = """examples:
  swin-quant predict out/my_calib.pth cat.jpg                              (INT8 as its run card says)
  swin-quant predict swin_tiny_patch4_window7_224.pth cat.jpg
  swin-quant predict out/my_int8.onnx holiday 'more/*.png' --engine openvino --json answers.json"""


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
    group.add_argument("--top", type=whole, default=5, metavar="N", help="classes a picture (default 5)")
    deployed.add_loading(group)
    options.add_json(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")


@dataclass(frozen=True)
class _Model:
    """What answers: an engine, and what its card says of its pictures and classes."""

    name: str
    engine: Engine
    preprocess: Preprocess
    classes: int
    names: Sequence[str] = ()


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.progress import log
    from swin_quant.data.named import NamedPictures
    from swin_quant.engines.infer import infer
    from swin_quant.tasks.predict import class_names, top_classes

    deployed.refuse_ranks(world, "predict")
    if args.top < 1:
        raise UsageError(f"--top {args.top}: must be at least 1")
    pictures = NamedPictures(args.images)
    model = _of_checkpoint(args, world) if deployed.is_checkpoint(args.model) else _of_artifact(args, world)
    names = class_names(model.classes, args.labels, model.names)
    inferred = infer(
        {model.engine.label: model.engine},
        pictures,
        model.preprocess,
        model.classes,
        batch_size=args.batch,
        workers=args.workers,
        device=world.device,
    )
    (logits,) = inferred.logits.values()
    answers = dict(zip(inferred.names, top_classes(logits, names, args.top), strict=True))
    unreadable = {name: _why(pictures, name) for name in inferred.unreadable}
    for why in unreadable.values():
        log.warning("skipped: %s", why)
    _write(args.json, model, answers, unreadable)


def _of_artifact(args: argparse.Namespace, world: World) -> _Model:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.tasks.deployed import config_of, labels_in, load_engines, names_of_engines, preprocess_of

    artifact = open_artifact(args.model)
    if args.cfg or args.policy:
        raise UsageError("--cfg and --policy are for checkpoints: the run card of an artifact says that")
    names = names_of_engines(artifact, args.engines)[: None if args.engines else 1]
    if len(names) > 1:
        raise UsageError("--engine: predict takes one engine")
    cfg, preprocess = config_of(artifact), preprocess_of(artifact)
    (engine,) = load_engines(artifact, names, deployed.engine_options(args, world)).values()
    return _Model(artifact.file.name, engine, preprocess, cfg.MODEL.NUM_CLASSES, labels_in(artifact))


def _of_checkpoint(args: argparse.Namespace, world: World) -> _Model:
    """Quantized as --policy or the card says, else in float."""
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.engines.torch_engines import torch_engines
    from swin_quant.tasks.evaluate import load_for_scoring

    if args.engines:
        raise UsageError("--engine is for artifacts: export the checkpoint, then name that")
    args.checkpoint = args.model
    cfg = options.config_of(args)
    subject = load_for_scoring(cfg, args.model, options.policies_of(args), world, args.replace_head)
    preprocess = Preprocess.from_dict(subject.card.preprocess)
    if preprocess.size != cfg.DATA.IMG_SIZE:
        raise SwinQuantError(
            f"{args.model}: its run card resizes pictures to {preprocess.size}, the model takes {cfg.DATA.IMG_SIZE}"
        )
    engine = list(torch_engines(subject.model, world.device, None, subject.policies[:1]).values())[-1]
    return _Model(Path(args.model).name, engine, preprocess, cfg.MODEL.NUM_CLASSES)


def _why(pictures: NamedPictures, name: str) -> str:
    from swin_quant.data.pictures import UnreadablePicture

    try:
        pictures.read(list(pictures.names).index(name))
    except UnreadablePicture as error:
        return str(error)
    return f"{name}: cannot be read"


def _write(
    target: str | None, model: _Model, answers: Mapping[str, Sequence[Guess]], unreadable: dict[str, str]
) -> None:
    from swin_quant.report.predictions import table_of
    from swin_quant.report.screen import print_table

    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": model.name,
        "engine": model.engine.name,
        "precision": model.engine.precision,
        "policy": model.engine.policy,
        "pictures": [{"picture": name, "classes": [asdict(guess) for guess in top]} for name, top in answers.items()],
        "unreadable": unreadable,
    }
    if target != "-":
        best = {name: [(guess.probability, guess.index, guess.name) for guess in top] for name, top in answers.items()}
        print_table(table_of(best, f"{model.name}: {model.engine.label} on {model.engine.name}"))
    if target:
        put(target, json.dumps(content, indent=2))
