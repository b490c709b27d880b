"""main.py: the flags of FasterTransformer's Swin toolkit, with their meaning (docs/reference, section 2.1).

Flags that were decorative there either work here or are refused with a sentence; none is ignored.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import SwinQuantError, UsageError, called, listed, memory_told
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cli import finetune, options, training
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import output_dir
from swin_quant.quant.names import INT8_MODES

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard
    from swin_quant.model import Model

HELP = "FasterTransformer's front door: --calib, --train, --eval and --throughput, alone or together."
EXAMPLES = """examples:
  python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 main.py --calib \\
      --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --resume swin_tiny_patch4_window7_224.pth \\
      --data-path imagenet --num-calib-batch 10 --calib-batchsz 8 --int8-mode 1 --calib-output-path out
  python main.py --eval --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --int8-mode 1 \\
      --resume out/swin_tiny_patch4_window7_224_calib.pth --data-path imagenet --batch-size 64"""

VERSIONS = {1: "swin", 2: "swinv2"}  # what its guide passes as --version
FT_DISTILLATION = {"distill_compat": "ft", "distillation_loss_scale": 10000.0}  # what --distill means there
# Options that mean something to --train alone.
TRAINING = ("epochs", "qat_lr", "lr", "go_on", "distill", "teacher", "teacher_cfg", "distillation_loss_scale",
            "temperature", "distill_compat",
            "accumulation_steps", "use_checkpoint", "compile", "amax", "fsdp", "offload", "recipe",
            "set", "overwrite", "tensorboard", "schedule", "drop_path", "plot")  # fmt: skip
NO_SWIN_NODE = "final_input"  # in FasterTransformer's list of keywords, from BERT
# Flag -> (argparse options, why it is refused).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "--engine": ({}, "engines are scored by `swin-quant evaluate MODEL.engine --data-path DIR`"),
    "--fused_window_process": (
        {"action": "store_true"},
        "the model has no fused window kernel; FasterTransformer's ignored the flag",
    ),
    "--fuse-qkv": (
        {"action": "store_true"},
        "Swin has one joint qkv linear, so there is nothing to fuse; FasterTransformer's option did nothing",
    ),
}


# What our commands call otherwise.
WORDS = {"--batch": "--batch-size", "--epochs": "--num-epochs", "--distill-weight": "--distillation_loss_scale"}
FIELDS = {"pictures": "--num-calib-batch times --calib-batchsz", "checkpoint": "--resume"}
FLAG = {"epochs": "--num-epochs", "distillation_loss_scale": "--distillation_loss_scale", "go_on": "--continue"}
AUTO = "auto"
_BATCHES, _BATCH = 4, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--cfg", required=True, metavar="FILE", help="YAML of the model, or the name of a shipped one")
    group.add_argument("--opts", nargs="+", metavar="KEY VALUE", help="set keys of the config, as KEY VALUE pairs")
    group.add_argument("--pretrained", metavar="FILE", help="checkpoint to start from")
    group.add_argument("--resume", metavar="auto|FILE",
                       help="the checkpoint; auto: go on with the training of the output folder")  # fmt: skip
    options.add_head(group)
    options.add_data(parser, WORDS)
    group = parser.add_argument_group("calibration")
    group.add_argument("--num-calib-batch", type=whole, default=_BATCHES, metavar="N", help=f"default {_BATCHES}")
    group.add_argument("--calib-batchsz", type=whole, default=_BATCH, metavar="N", help=f"default {_BATCH}")
    group.add_argument("--calib-output-path", metavar="DIR", help="default: DIR/<NAME>/<TAG> of --output")
    group.add_argument("--calib-split", metavar="SPLIT", help="pictures to sample (default train)")
    group.add_argument("--calib-augment", action="store_true", help="FasterTransformer's augmented training crops")
    options.add_calibrator(parser)
    options.add_passes(parser, automatic=False)
    group = options.add_policy(parser)
    group.add_argument("--int8-mode", type=whole, choices=tuple(INT8_MODES), help="FasterTransformer's modes")
    group.add_argument("--quant-disable", action="store_true", help="quantize nothing (the policy `float`)")
    group.add_argument(
        "--quant-disable-keyword", nargs="+", metavar="TEXT", help="switch off nodes with TEXT in their name"
    )
    training.add_training(parser, WORDS)
    training.add_qat(parser, WORDS)
    parser.add_argument("--qat-lr", type=float, metavar="LR", help="the same as --lr")
    options.add_original(parser)
    options.add_run(parser)
    parser.add_argument("--output", metavar="DIR", help="results go to DIR/<NAME>/<TAG> (default: output)")
    parser.add_argument("--tag", help="default: default")
    parser.add_argument("--calib", action="store_true", help="calibrate, save <NAME>_calib.pth, score it on val")
    parser.add_argument("--train", action="store_true", help="QAT of --resume, or of what --calib made; scored on val")
    parser.add_argument("--eval", action="store_true", help="score --resume on val")
    parser.add_argument("--throughput", action="store_true", help="images/s on the first val batch, then stop")
    parser.add_argument("--disable_amp", action="store_true", help="no half-precision baseline (= --half none)")
    for flag, (kind, _) in REFUSED.items():
        parser.add_argument(flag, default=None, help=argparse.SUPPRESS, **kind)
    parser.add_argument("--version", type=whole, choices=tuple(VERSIONS), help=argparse.SUPPRESS)
    parser.add_argument("--quant-mode", choices=("ft1", "ft2", "ft3", "trt"), help=argparse.SUPPRESS)
    parser.set_defaults(split="val", random_weights=False)


def run(args: argparse.Namespace, world: World) -> None:
    _refuse(args)
    _settle(args)
    if args.disable_amp or args.amp_opt_level == "O0":
        args.half = "none"
    if not (args.calib or args.train or args.eval or args.throughput):
        raise UsageError("nothing to do: give --calib, --train, --eval or --throughput")
    log_file = _open_log(args, world)
    if args.throughput:
        _throughput(args, world)
        return
    if args.calib:
        with called(batch="--calib-batchsz"), memory_told():
            model, card = _calibrate(args, world)
        _say_accuracy(card, args, world, log_file)
        args.checkpoint = str(model.checkpoint)
    if args.train:
        if args.distill:
            for flag, value in FT_DISTILLATION.items():
                setattr(args, flag, getattr(args, flag) or value)
        elif not args.recipe:
            args.set = ["distill.weight=0", *args.set]
        _say_accuracy(finetune.run(args, world), args, world, log_file)
    elif args.eval and not args.calib:
        _say_accuracy(_evaluate(args, world), args, world, log_file)


def _calibrate(args: argparse.Namespace, world: World) -> tuple[Model, RunCard | None]:
    from swin_quant.verbs.calibrate import CalibrationPlan, calibrate_and_score

    if not args.checkpoint:
        raise UsageError("no checkpoint: name one by --resume or --pretrained")
    cfg, policies = options.config_of(args), options.policies_of(args)
    plan = CalibrationPlan(
        args.num_calib_batch,
        args.calib_batchsz,
        args.calib_split or "train",
        cfg.SEED,
        args.calib_augment,
        options.method_of(args),
        args.max_unreadable,
        options.passes_of(args),
    )
    folder = Path(args.calib_output_path) if args.calib_output_path else output_dir(args, cfg)
    half = None if args.no_eval else args.half
    return calibrate_and_score(cfg, args.checkpoint, policies, plan, folder, world, half, args.replace_head)


def _evaluate(args: argparse.Namespace, world: World) -> RunCard:
    from swin_quant.cli.flags import options_from
    from swin_quant.cli.shared import ModelOptions, PolicyOptions, RunOptions, ScoringOptions
    from swin_quant.verbs.evaluate import EvaluateOptions, evaluate_checkpoint

    if not args.checkpoint:
        raise UsageError("nothing to score: give --resume FILE")
    asked = EvaluateOptions(
        checkpoint=options.found(args.checkpoint),
        model=ModelOptions(cfg=args.cfg, opts=tuple(args.opts or ())),
        replace_head=args.replace_head,
        data=options_from(args, ScoringOptions),
        policy=options_from(args, PolicyOptions),
        original=args.original,
        run=options_from(args, RunOptions),
        output=args.output,
    )
    return evaluate_checkpoint(asked, world, output_dir(args, options.config_of(args)))


def _settle(args: argparse.Namespace) -> None:
    """FasterTransformer's words as ours."""
    from swin_quant.base.progress import log

    if NO_SWIN_NODE in (args.quant_disable_keyword or ()):
        log.info("--quant-disable-keyword %s: left out, for no node of Swin is called so (BERT's is)", NO_SWIN_NODE)
    keywords = [word for word in args.quant_disable_keyword or () if word != NO_SWIN_NODE]
    args.off = [*(args.off or ()), *(f"*{word}*" for word in keywords)]
    if args.int8_mode:
        args.policy = [INT8_MODES[args.int8_mode]]
    if args.quant_disable:
        args.policy = ["float"]
    args.lr = args.qat_lr if args.lr is None else args.lr
    args.go_on = args.go_on or args.resume == AUTO
    args.checkpoint = args.pretrained or (None if args.resume == AUTO else args.resume)


def _refuse(args: argparse.Namespace) -> None:
    for flag, (_, reason) in REFUSED.items():
        if getattr(args, flag.strip("-").replace("-", "_")):
            raise UsageError(f"{flag}: {reason}")
    if args.quant_mode and not (args.quant_mode == "ft2" and args.int8_mode):
        raise UsageError(
            f"--quant-mode {args.quant_mode}: the default ft2 is what --int8-mode 1 or 2 chooses; no kernel of "
            "FasterTransformer's Swin runs the others: for ONNX and TensorRT there are --policy qdq and tensorrt"
        )
    if args.int8_mode and args.policy:
        raise UsageError("--int8-mode and --policy both choose the nodes: give one of them")
    if args.pretrained and args.resume and not (args.train and args.resume == AUTO):
        raise UsageError("--pretrained and --resume both name the weights: give one of them")
    from swin_quant.config import find_config, load_config

    cfg = load_config(find_config(args.cfg), args.opts or ())
    if args.version and VERSIONS[args.version] != cfg.MODEL.TYPE:
        raise UsageError(f"--version {args.version}: the config says so itself, and MODEL.TYPE is {cfg.MODEL.TYPE}")
    if args.train and args.teacher and not (args.distill or args.recipe):
        raise UsageError("--teacher: is for --distill: add it, or leave the teacher out")
    if not args.train and (idle := [name for name in TRAINING if getattr(args, name)]):
        flag = FLAG.get(idle[0], f"--{idle[0].replace('_', '-')}")
        raise UsageError(f"{flag}: is for training: add --train, or leave it out")
    if args.original and not (args.train or args.eval):
        raise UsageError("--float: is for --train and --eval: add one of them, or leave it out")
    if args.throughput and (args.calib or args.train):
        flag = "--calib" if args.calib else "--train"
        raise UsageError(f"--throughput times a checkpoint and stops: run it after {flag}, on the file that leaves")
    if args.eval and args.no_eval:
        raise UsageError("--eval and --no-eval contradict each other: give one of them")
    if args.amp_opt_level in ("O2", "O3") and not args.train:
        raise UsageError(f"--amp-opt-level {args.amp_opt_level} is for training: evaluation has O0 and O1")
    if args.resume == AUTO and (args.calib or not args.train):
        raise UsageError("--resume auto goes on with --train: name the checkpoint for everything else")


def _open_log(args: argparse.Namespace, world: World) -> logging.Handler:
    """FasterTransformer's output folder: the config as it was used, and the log of each rank, which is returned."""
    import yaml

    from swin_quant.base.progress import log
    from swin_quant.config import to_dict

    cfg = options.config_of(args)
    directory = ensure_writable_dir(output_dir(args, cfg))
    try:
        handler = logging.FileHandler(directory / f"log_rank{world.rank}.txt", encoding="utf-8")
    except OSError as error:
        raise SwinQuantError(f"{directory}: cannot write a log there: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    if world.is_main:
        atomic_write_bytes(directory / "config.yaml", yaml.safe_dump(to_dict(cfg)).encode())
    return handler


def _say_accuracy(card: RunCard | None, args: argparse.Namespace, world: World, log_file: logging.Handler) -> None:
    """FasterTransformer's lines, for scripts that look for them: of each policy, else of the float model."""
    from swin_quant.cards.records import QAT

    if card is None or not world.is_main:
        return
    here = (options.config_of(args).DATA.BATCH_SIZE, world.device.type)
    own = [r for r in card.measured() if (r.batch_size, r.device) == here and (r.policy or r.precision == "float32")]
    own = [result for result in own if result.weights in (None, QAT)]  # not of what QAT began with
    results = {result.policy_sha256: result for result in own}
    policies = options.policies_of(args) or ([training.policy_of_card(card)] if card.policy else [])
    scored = [results.get(policy.sha256) or results[None] for policy in policies]
    for result in scored or [results[None]]:
        images = result.dataset["pictures"]
        for line in (
            f" * Acc@1 {result.acc1:.3f} Acc@5 {result.acc5:.3f}",
            f"Accuracy of the network on the {images} test images: {result.acc1:.1f}%",
        ):
            print(line)
            log_file.handle(logging.makeLogRecord({"levelname": "INFO", "levelno": logging.INFO, "msg": line}))


def _throughput(args: argparse.Namespace, world: World) -> None:
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.loading import load_for_scoring
    from swin_quant.score.engine import half_type
    from swin_quant.score.latency import throughput
    from swin_quant.score.scoring import open_labelled
    from swin_quant.score.torch_engines import torch_engines

    if not args.checkpoint:
        raise UsageError("no checkpoint: give --resume FILE")
    cfg = options.config_of(args)
    subject = load_for_scoring(cfg, args.checkpoint, options.policies_of(args), world, args.replace_head)
    pictures = open_labelled(cfg, args.split, world, class_names=subject.card.class_names)
    first = [list(range(min(cfg.DATA.BATCH_SIZE, len(pictures))))]
    batch = next(load_batches(pictures, Preprocess.from_dict(subject.card.preprocess), first))
    if not batch.indices:
        raise SwinQuantError(f"{cfg.DATA.DATA_PATH}: the first batch is unreadable: {listed(batch.unreadable)}")
    images = batch.images.to(world.device)
    half = half_type(args.half, world.device)
    for label, engine in torch_engines(subject.model, world.device, half, subject.policies).items():
        rate = throughput(engine, images)
        if world.is_main:
            print(f"batch_size {len(images)} {engine.name} {label} throughput {rate:.1f} images/s")
