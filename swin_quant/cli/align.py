"""swin-quant align."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import deployed, options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put
from swin_quant.cli.shared import is_checkpoint, one_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from swin_quant.base.distributed import World
    from swin_quant.score.alignment import Differences
    from swin_quant.tasks.align import Side

HELP = """Two engines, checkpoints or dumps on the same pictures, layer by layer: largest and mean difference, cosine,
SQNR, the first tensor that differs. Or one training step of two frameworks, group by group. A and B: a checkpoint (run
by torch), an artifact, or tensors that were dumped: an .npz, a folder of .npy."""
EXAMPLES = """examples:
  swin-quant align out/my_calib.pth out/my_int8_openvino.onnx --policy cpu --images cat.jpg photo.jpg
  swin-quant align my.pth out/my_calib.pth --policy float qdq --data-path data      (what quantization costs, where)
  swin-quant align out/my_int8.onnx out/my_int8.onnx --engine onnxruntime openvino --data-path data
  swin-quant align my.pth --to theirs.npz --data-path data                          (dump the images and all tensors)
  swin-quant align my.pth theirs.npz                                                (on the images that it holds)
  swin-quant align my.pth --step --to step.npz --data-path data
  swin-quant align my.pth step.npz --step --data-path data                          (one training step, in order)"""
DEFAULT_PICTURES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="checkpoint, artifact or dump")
    parser.add_argument("b", metavar="B", nargs="?", help="what it is compared with; may be left out with --to")
    options.add_config(parser.add_argument_group("model"))
    group = parser.add_argument_group("comparing")
    group.add_argument("--policy", nargs="+", metavar="NAME|FILE",
                       help="of the checkpoints: one of both, or A's and B's (default: their run cards')")  # fmt: skip
    group.add_argument("--below", type=float, metavar="DB",
                       help="SQNR below which tensors differ (default: 60; two INT8 sides: 30; one: 15)")  # fmt: skip
    group.add_argument("--pictures", type=whole, default=DEFAULT_PICTURES, metavar="N",
                       help=f"pictures, evenly spread over those there are (default {DEFAULT_PICTURES})")  # fmt: skip
    group.add_argument("--only", nargs="+", metavar="NODES", default=(), help="print tensors of these names (*, ?)")
    group.add_argument("--to", metavar="FILE", help="dump the images and A's tensors, as .npz")
    group.add_argument("--names", default="ours", choices=("ours", "mindspore"),
                       help="of parameters in --to (default ours); read are both")  # fmt: skip
    group.add_argument("--step", action="store_true", help="one training step instead: float checkpoints, with labels")
    group.add_argument("--lr", type=float, default=0.01, metavar="LR", help="of --step, plain SGD (default 0.01)")
    deployed.add_engines(parser)
    deployed.add_pictures(parser, workers=False)
    options.add_json(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.tasks.align import dump

    one_process(world, "align")
    if args.b is None and not args.to:
        raise UsageError("nothing to compare with: give B, or --to FILE to dump A's tensors")
    if args.pictures < 1:
        raise UsageError(f"--pictures {args.pictures}: must be at least 1")
    if args.to and not args.to.endswith(".npz"):
        raise UsageError(f"--to {args.to}: must end in .npz")
    if args.opts and not args.cfg:
        raise UsageError("--opts: sets keys of --cfg: give both, or none")
    sides = _sides(args, world)
    if args.step:
        _step(args, sides)
        return
    if args.to:
        import torch

        images = torch.cat([images for images, _ in _pictures(args, sides)])
        _log_dump(args.to, dump(sides[0], args.to, images, args.names))
    if len(sides) > 1:
        from swin_quant.tasks.align import align

        held = any(side.dumped is not None and "input/images" in side.dumped for side in sides)
        both = all(side.dumped is not None for side in sides)
        batches = () if held or both else (images for images, _ in _pictures(args, sides))
        _show(args, align(sides[0], sides[1], batches, args.below))


def _step(args: argparse.Namespace, sides: list[Side]) -> None:
    from swin_quant.tasks.align import align_step, dump, step_of

    given = None
    if args.data_path:
        import torch

        images, labels = zip(*_pictures(args, sides, labelled=True), strict=True)
        given = torch.cat(images), torch.cat(labels)
    others = [sides[-1], sides[0]] if len(sides) > 1 else [None]
    steps = [step_of(side, args.lr, given, other) for side, other in zip(sides, others, strict=True)]
    if args.to:
        _log_dump(args.to, dump(steps[0], args.to, names=args.names))
    if len(steps) > 1:
        _show(args, align_step(steps[0], steps[1], args.below))


def _sides(args: argparse.Namespace, world: World) -> list[Side]:
    from swin_quant.checkpoint.identify import config_given
    from swin_quant.quant.policies import load_policy
    from swin_quant.tasks.align import is_dump, side_of

    places = [place for place in (args.a, args.b) if place]
    policies = _one_each("--policy", args.policy, len(places))
    engines = _one_each("--engine", args.engines, len(places))
    wanted = options.model_keys(args)
    sides = []
    for place, policy, engine in zip(places, policies, engines, strict=True):
        dumped = is_dump(place)
        checkpoint = not dumped and is_checkpoint(place)
        chosen = load_policy(policy) if policy and checkpoint else None
        cfg = config_given(args.cfg, place if checkpoint else None, args.opts or (), wanted) if args.cfg else None
        on = engine if not dumped and not checkpoint else None
        sides.append(side_of(place, chosen, on, deployed.engine_options(args, world), world, cfg, wanted))
    return sides


def _one_each(flag: str, given: list[str] | None, count: int) -> list[str | None]:
    """One word stands for all sides, two for A and B: what a side has no use for is left alone."""
    if given is None:
        return [None] * count
    if len(given) not in (1, count):
        raise UsageError(f"{flag} {' '.join(given)}: give one of both sides, or one each")
    return [*given] if len(given) == count else [*given] * count


def _pictures(args: argparse.Namespace, sides: list[Side], labelled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    from swin_quant.data.sources import open_pictures
    from swin_quant.tasks.align import batches_of, preprocessing_of

    classes = next((side.classes for side in sides if side.classes), None) if labelled else None
    if classes is not None and args.data_path:
        found = open_pictures(args.data_path, args.split, zip_mode=args.zip, cache_mode="no", num_classes=classes)
    else:
        found = deployed.pictures_of(args)
    preprocess = preprocessing_of(sides[0], sides[1] if len(sides) > 1 else None)
    return batches_of(found, preprocess, args.pictures, args.batch, args.max_unreadable)


def _log_dump(file: str, count: int) -> None:
    from swin_quant.base.progress import log

    log.info("%s: %d tensors", file, count)


def _show(args: argparse.Namespace, found: Differences) -> None:
    from swin_quant.report.alignment import as_data, table_of
    from swin_quant.report.table import print_table

    if args.json != "-":
        print_table(table_of(found, args.only))
    if args.json:
        put(args.json, json.dumps(as_data(found), indent=2))
