"""swin-quant export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.backends.backend import PRECISIONS
from swin_quant.backends.registry import targets
from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World

HELP = "Export a calibrated checkpoint to what will be deployed: FasterTransformer's weights, or ONNX for an engine."
EXAMPLES = """examples:
  swin-quant export out/my_calib.pth --for openvino --output out/openvino
  swin-quant export out/my_calib.pth --for openvino --precision float --output out/openvino  (baseline)
  swin-quant export out/my_calib.pth --for openvino --saturation-safe --output out  (CPUs without VNNI)
  swin-quant export out/my_calib.pth --for fastertransformer --sm 80 --check --output out/ft
  swin-quant export out/my_calib.pth --for onnx --plugin layer_norm=my.domain::Norm --output out/plugin
  swin-quant export theirs_calib.pth --for onnx --policy qdq --output out
  swin-quant export out/my_calib.pth --for onnx --policy qdq --off role:matmul_input --output out

Config and preprocessing are those of the run card beside the checkpoint; --cfg is for one that has none. Policies:
the card's, so that what was calibrated and scored is what is exported. A backend that does not take it gets its own
best (every node was calibrated), which a warning names; one of your own, or of training, always stays."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_export(parser)
    parser.add_argument("--for", dest="backend", required=True, choices=tuple(targets()), help="what is to run it")
    parser.add_argument("--opset", type=whole, metavar="N", help="ONNX: 17 to 20 (default 20; 21 with --int4-weights)")
    parser.add_argument("--int4-weights", action="store_true",
                        help="ONNX: store weights of at most 4 bits as INT4 (policies w4a16, w4a8)")  # fmt: skip
    options.add_output_kind(parser)
    parser.add_argument("--replace", nargs="+", metavar="NAME",
                        help="ONNX: equivalent operators for some: roll, gather, ... (docs/analyze.md)")  # fmt: skip
    parser.add_argument("--plugin", nargs="+", metavar="OP=DOMAIN::NAME",
                        help="ONNX: operators as nodes of a domain of your own (docs/custom_operators.md)")  # fmt: skip
    parser.add_argument("--uint8-input", action="store_true",
                        help="ONNX, cuda: pictures are uint8 [batch, S, S, 3], which the file normalises")  # fmt: skip
    parser.add_argument("--softmax", action="store_true", help="ONNX: give probabilities, too")
    parser.add_argument("--top-k", type=whole, metavar="N", help="ONNX: give the N best classes and theirs, too")
    parser.add_argument("--labels", metavar="FILE", help="ONNX: class names, one a line, to travel in the file")


def add_export(parser: argparse.ArgumentParser) -> None:
    """What exports for all targets have in common."""
    options.add_checkpoint(parser, "calibrated checkpoint, ours or FasterTransformer's", head=False)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the artifact and its run card")
    parser.add_argument("--precision", default="int8", choices=PRECISIONS, help="float: the baseline (default int8)")
    parser.add_argument("--float-type", choices=("float32", "float16", "bfloat16"),
                        help="of what is not int8 (default: float32; for GPUs float16; bfloat16: cuda)")  # fmt: skip
    parser.add_argument("--batch", type=whole, metavar="N",
                        help="ONNX: only batches of N; fastertransformer, cuda: up to N")  # fmt: skip
    parser.add_argument("--sm", type=whole, metavar="NN", help="fastertransformer: compute capability (default 80)")
    parser.add_argument("--fix-gelu-bias", action="store_true",
                        help="fastertransformer: undo its misreading of more than 4096 biases (Swin-L)")  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="run or read back the export and compare it with the model"
    )
    options.add_policy(parser, "see below")
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    if world.size > 1:
        raise UsageError("export runs in one process: start it without torchrun")
    from swin_quant.backends.saturation import at_risk, warn
    from swin_quant.base.files import read_lines
    from swin_quant.base.progress import log
    from swin_quant.tasks.export import export_checkpoint

    if not args.checkpoint:
        raise UsageError("no checkpoint: name the calibrated one")
    cfg = options.config_of(args, {key: options.CONFIG_KEYS[key] for key in ("checkpoint", "output_kind")})
    policy = options.policy_of(args)
    backend = targets()[args.backend]
    checks_itself = "check" in backend.exporting.flags
    given = {key: getattr(args, key) for key in ("opset", "float_type", "batch", "sm", "fix_gelu_bias", "int4_weights")}
    given |= {key: getattr(args, key, None) for key in ("uint8_input", "softmax", "top_k")}
    given |= {key: tuple(value) for key in ("replace", "plugin") if (value := getattr(args, key, None))}
    given["check"] = args.check and checks_itself
    given["labels"] = tuple(read_lines(args.labels, "list of class names")) if args.labels else None
    artifact, model = export_checkpoint(
        args.checkpoint, args.backend, args.output, cfg, policy, args.precision, given, args.saturation_safe
    )
    if args.check and not checks_itself:
        from swin_quant.tasks.export_check import check_export

        log.info("check: %s", check_export(artifact, model))  # its engine says whether products saturate here
    else:
        for engine in at_risk(backend):
            warn(engine, artifact)
    _print(artifact, args)


def _print(artifact: Artifact, args: argparse.Namespace) -> None:
    from swin_quant.base.progress import log
    from swin_quant.cards.paths import card_path
    from swin_quant.config.outputs import LOGITS

    record = artifact.record
    policy = f", policy {artifact.card.policy['name']}" if artifact.card.policy else ""
    log.info("%s: %s%s, %.1f MB", record["backend"], record["precision"], policy, artifact.file.stat().st_size / 1e6)
    for other in record["others"]:
        log.info("with it: %s", artifact.file.with_name(other["file"]))
    log.info("run card: %s", card_path(artifact.file))
    print(artifact.file)
    backend = targets()[args.backend]
    runnable = record["precision"] == "int8" or not backend.only_quantized
    runnable &= artifact.card.config["MODEL"].get("OUTPUT_KIND", LOGITS) == LOGITS  # what comes next is about logits
    for command in backend.exporting.next_step if runnable else ():
        log.info("next: %s", command.format(file=artifact.file, checkpoint=Path(args.checkpoint)))
