"""FasterTransformer's front door: --calib, --train, --eval and --throughput, alone or together."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.base.errors import SwinQuantError, UsageError, called, listed, memory_errors_named
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import QAT
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, flags_given
from swin_quant.config import find_config, load_config, to_dict
from swin_quant.quant import INT8_MODES
from swin_quant.verbs.finetune import FinetuneOptions, QatOptions, finetune_and_show
from swin_quant.verbs.train import TrainingOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import OpenedCheckpoint
    from swin_quant.model import Model
    from swin_quant.quant.passes.run import PassPlan

EXAMPLES = """examples:
  python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 main.py --calib \\
      --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --resume swin_tiny_patch4_window7_224.pth \\
      --data-path imagenet --num-calib-batch 10 --calib-batchsz 8 --int8-mode 1 --calib-output-path out
  python main.py --eval --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --int8-mode 1 \\
      --resume out/swin_tiny_patch4_window7_224_calib.pth --data-path imagenet --batch-size 64"""

VERSIONS = {1: "swin", 2: "swinv2"}  # values of --version in its guide
NO_SWIN_NODE = "final_input"  # in FasterTransformer's list of keywords, from BERT
REFUSED = {  # flag -> why
    "--engine": "engines are scored by `swin-quant evaluate MODEL.engine --data-path DIR`",
    "--fused_window_process": "the model has no fused window kernel; FasterTransformer's ignored the flag",
    "--fuse-qkv": "Swin has one joint qkv linear, so there is nothing to fuse; FasterTransformer's option did nothing",
}
# Our flag -> its name in main.py.
WORDS = {"--batch": "--batch-size", "--epochs": "--num-epochs", "--distill-weight": "--distillation_loss_scale"}
FIELDS = {"pictures": "--num-calib-batch times --calib-batchsz", "checkpoint": "--resume"}
_AUTO = "auto"
_HIDDEN = argparse.SUPPRESS


@dataclass(frozen=True)
class CalibOptions:
    """Which pictures calibrate."""

    TITLE = "calibration"
    num_calib_batch: Annotated[int, Flag("batches", "N")] = 4
    calib_batchsz: Annotated[int, Flag("pictures a batch", "N")] = 8
    calib_output_path: Annotated[str | None, Flag("default: DIR/<NAME>/<TAG> of --output", "DIR")] = None
    calib_split: Annotated[str | None, Flag("pictures to sample (default train)", "SPLIT")] = None
    calib_augment: Annotated[bool, Flag("FasterTransformer's augmented training crops")] = False
    passes: Annotated[str | None, Flag(shared.pass_recipes, "NAME|FILE")] = None

    def plan(self) -> PassPlan:
        """The passes that are asked for; main.py does nothing unasked."""
        from swin_quant.quant.passes.run import PassPlan

        return shared.PassOptions(self.passes).plan() if self.passes else PassPlan()


@dataclass(frozen=True)
class FrontDoorOptions:
    """FasterTransformer's flags (docs/reference, section 2.1), translated into the options of our verbs.

    Flags that were decorative there either work here or are refused with a sentence; none is ignored.
    """

    cfg: Annotated[str, Flag("YAML of the model, or the name of a shipped one", "FILE")]
    opts: Annotated[tuple[str, ...], Flag("set keys of the config, as KEY VALUE pairs", "KEY VALUE")] = ()
    pretrained: Annotated[str | None, Flag("checkpoint to start from", "FILE")] = None
    resume: Annotated[
        str | None, Flag("the checkpoint; auto: go on with the training of the output folder", "auto|FILE")
    ] = None
    replace_head: shared.ReplaceHead = False
    data: shared.ScoringOptions = shared.ScoringOptions()
    calibration: CalibOptions = CalibOptions()
    ranges: shared.RangeOptions = shared.RangeOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    int8_mode: Annotated[int | None, Flag("FasterTransformer's modes", choices=tuple(INT8_MODES))] = None
    quant_disable: Annotated[bool, Flag("quantize nothing (the policy `float`)")] = False
    quant_disable_keyword: Annotated[tuple[str, ...], Flag("switch off nodes with TEXT in their name", "TEXT")] = ()
    training: TrainingOptions = TrainingOptions()
    no_eval: shared.NoEval = False
    qat: QatOptions = QatOptions()
    qat_lr: Annotated[float | None, Flag("the same as --lr", "LR")] = None
    original: shared.Original = None
    run: shared.RunOptions = shared.RunOptions()
    output: Annotated[str | None, Flag("results go to DIR/<NAME>/<TAG> (default: output)", "DIR")] = None
    tag: Annotated[str | None, Flag("default: default")] = None
    calib: Annotated[bool, Flag("calibrate, save <NAME>_calib.pth, score it on val")] = False
    train: Annotated[bool, Flag("QAT of --resume, or of what --calib made; scored on val")] = False
    eval: Annotated[bool, Flag("score --resume on val")] = False
    throughput: Annotated[bool, Flag("images/s on the first val batch, then stop")] = False
    disable_amp: Annotated[bool, Flag("no half-precision baseline (= --half none)", name="--disable_amp")] = False
    engine: Annotated[str | None, Flag(_HIDDEN)] = None
    fused_window_process: Annotated[bool, Flag(_HIDDEN, name="--fused_window_process")] = False
    fuse_qkv: Annotated[bool, Flag(_HIDDEN)] = False
    version: Annotated[int | None, Flag(_HIDDEN, choices=tuple(VERSIONS))] = None
    quant_mode: Annotated[Literal["ft1", "ft2", "ft3", "trt"] | None, Flag(_HIDDEN)] = None

    @cached_property
    def checkpoint(self) -> OpenedCheckpoint | None:
        return shared.opened(self.pretrained or (None if self.resume == _AUTO else self.resume))

    @property
    def model(self) -> shared.ModelOptions:
        return shared.ModelOptions(cfg=self.cfg, opts=self.opts)

    def config(self) -> CfgNode:
        """The config; its MODEL.RESUME is the checkpoint."""
        return shared.config_of(self.checkpoint, self.model, self.data, self.run, OUTPUT=self.output, TAG=self.tag)

    @property
    def for_training(self) -> list[str]:
        """The flags that were given and mean something to --train alone."""
        given = flags_given(self.training, self.qat) + ["--qat-lr"] * (self.qat_lr is not None)
        return [WORDS.get(flag, flag) for flag in given if flag != "--amp-opt-level"]


def run(options: FrontDoorOptions, world: World) -> None:
    _refuse(options)
    options = _in_our_words(options)
    if not (options.calib or options.train or options.eval or options.throughput):
        raise UsageError("nothing to do: give --calib, --train, --eval or --throughput")
    cfg = options.config()
    folder = Path(cfg.OUTPUT or "output") / cfg.MODEL.NAME / cfg.TAG
    log_file = _open_log(cfg, folder, world)
    if options.throughput:
        _throughput(options, cfg, world)
        return
    if options.calib:
        with called(batch="--calib-batchsz"), memory_errors_named():
            model, card = _calibrate(options, cfg, folder, world)
        _say_accuracy(card, options, cfg, world, log_file)
        options = replace(options, pretrained=str(model.checkpoint), resume=None)
        cfg = options.config()
    if options.train:
        verb_options = FinetuneOptions(
            replace_head=options.replace_head,
            data=options.data,
            policy=options.policy,
            training=options.training,
            no_eval=options.no_eval,
            qat=options.qat,
            original=options.original,
        )
        scored = finetune_and_show(verb_options, options.checkpoint, cfg, folder, world).evaluation
        _say_accuracy(scored.card if scored.results else None, options, cfg, world, log_file)
    elif options.eval and not options.calib:
        _say_accuracy(_evaluate(options, folder, world), options, cfg, world, log_file)


def _calibrate(options: FrontDoorOptions, cfg: CfgNode, folder: Path, world: World) -> tuple[Model, RunCard | None]:
    from swin_quant.verbs.calibrate import CalibrateOptions, calibrate_and_score
    from swin_quant.verbs.calibration_result import CalibrationPlan

    if not options.checkpoint:
        raise UsageError("no checkpoint: name one by --resume or --pretrained")
    sample = options.calibration
    plan = CalibrationPlan(
        sample.num_calib_batch * sample.calib_batchsz,
        sample.calib_split or "train",
        cfg.SEED,
        sample.calib_batchsz,
        options.data.max_unreadable,
        sample.calib_augment,
        options.ranges.method(),
        sample.plan(),
    )
    folder = Path(sample.calib_output_path) if sample.calib_output_path else folder
    verb_options = CalibrateOptions(
        replace_head=options.replace_head, data=options.data, policy=options.policy, no_eval=options.no_eval
    )
    return calibrate_and_score(verb_options, options.checkpoint, cfg, plan, folder, world)


def _evaluate(options: FrontDoorOptions, folder: Path, world: World) -> RunCard:
    from swin_quant.verbs.evaluate import EvaluateOptions, evaluate_checkpoint

    if not options.checkpoint:
        raise UsageError("nothing to score: give --resume FILE")
    verb_options = EvaluateOptions(
        model=options.model,
        replace_head=options.replace_head,
        data=options.data,
        policy=options.policy,
        original=options.original,
        run=options.run,
        output=options.output,
    )
    return evaluate_checkpoint(verb_options, options.checkpoint, world, folder)


def _in_our_words(options: FrontDoorOptions) -> FrontDoorOptions:
    """FasterTransformer's words as our options."""
    if NO_SWIN_NODE in options.quant_disable_keyword:
        log.info("--quant-disable-keyword %s: left out, for no node of Swin is called so (BERT's is)", NO_SWIN_NODE)
    keywords = [word for word in options.quant_disable_keyword if word != NO_SWIN_NODE]
    policy, data, training, qat = options.policy, options.data, options.training, options.qat
    policy = replace(policy, off=(*policy.off, *(f"*{word}*" for word in keywords)))
    if options.int8_mode:
        policy = replace(policy, policy=(INT8_MODES[options.int8_mode],))
    if options.quant_disable:
        policy = replace(policy, policy=("float",))
    if options.disable_amp or training.amp_opt_level == "O0":
        data = replace(data, half="none")
    lr = options.qat_lr if training.lr is None else training.lr
    training = replace(training, lr=lr, go_on=training.go_on or options.resume == _AUTO)
    if qat.distill:  # its meaning there
        qat = replace(qat, distill_compat=qat.distill_compat or "ft", distill_weight=qat.distill_weight or 10000.0)
    elif not training.recipe:
        training = replace(training, set=("distill.weight=0", *training.set))
    return replace(options, policy=policy, data=data, training=training, qat=qat)


def _refuse(options: FrontDoorOptions) -> None:
    for flag, reason in REFUSED.items():
        if getattr(options, flag.strip("-").replace("-", "_")):
            raise UsageError(f"{flag}: {reason}")
    if options.quant_mode and not (options.quant_mode == "ft2" and options.int8_mode):
        raise UsageError(
            f"--quant-mode {options.quant_mode}: the default ft2 is what --int8-mode 1 or 2 chooses; no kernel of "
            "FasterTransformer's Swin runs the others: for ONNX and TensorRT there are --policy qdq and tensorrt"
        )
    if options.int8_mode and options.policy.policy:
        raise UsageError("--int8-mode and --policy both choose the nodes: give one of them")
    if options.pretrained and options.resume and not (options.train and options.resume == _AUTO):
        raise UsageError("--pretrained and --resume both name the weights: give one of them")
    cfg = load_config(find_config(options.cfg), options.opts)
    if options.version and VERSIONS[options.version] != cfg.MODEL.TYPE:
        raise UsageError(f"--version {options.version}: the config says so itself, and MODEL.TYPE is {cfg.MODEL.TYPE}")
    if options.train and options.qat.teacher and not (options.qat.distill or options.training.recipe):
        raise UsageError("--teacher: is for --distill: add it, or leave the teacher out")
    if not options.train and (idle := options.for_training):
        raise UsageError(f"{idle[0]}: is for training: add --train, or leave it out")
    if options.original and not (options.train or options.eval):
        raise UsageError("--float: is for --train and --eval: add one of them, or leave it out")
    if options.throughput and (options.calib or options.train):
        flag = "--calib" if options.calib else "--train"
        raise UsageError(f"--throughput times a checkpoint and stops: run it after {flag}, on the file that leaves")
    if options.eval and options.no_eval:
        raise UsageError("--eval and --no-eval contradict each other: give one of them")
    level = options.training.amp_opt_level
    if level in ("O2", "O3") and not options.train:
        raise UsageError(f"--amp-opt-level {level} is for training: evaluation has O0 and O1")
    if options.resume == _AUTO and (options.calib or not options.train):
        raise UsageError("--resume auto goes on with --train: name the checkpoint for everything else")


def _open_log(cfg: CfgNode, folder: Path, world: World) -> logging.Handler:
    """FasterTransformer's output folder: the config as it was used, and the log of each rank, which is returned."""
    import yaml

    ensure_writable_dir(folder)
    try:
        handler = logging.FileHandler(folder / f"log_rank{world.rank}.txt", encoding="utf-8")
    except OSError as error:
        raise SwinQuantError(f"{folder}: cannot write a log there: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    if world.is_main:
        atomic_write_bytes(folder / "config.yaml", yaml.safe_dump(to_dict(cfg)).encode())
    return handler


def _say_accuracy(
    card: RunCard | None, options: FrontDoorOptions, cfg: CfgNode, world: World, log_file: logging.Handler
) -> None:
    """FasterTransformer's lines, for scripts that look for them: one for each policy, else one for the float model."""
    from swin_quant.quant.policy import policy_from_dict

    if card is None or not world.is_main:
        return
    here = (cfg.DATA.BATCH_SIZE, world.device.type)
    own = [r for r in card.measured() if (r.batch_size, r.device) == here and (r.policy or r.precision == "float32")]
    own = [result for result in own if result.weights in (None, QAT)]  # not of the checkpoint that QAT began with
    results = {result.policy_sha256: result for result in own}
    policies = options.policy.policies() or ([policy_from_dict(card.policy, "run card")] if card.policy else [])
    scored = [results.get(policy.sha256) or results[None] for policy in policies]
    for result in scored or [results[None]]:
        images = result.dataset["pictures"]
        for line in (
            f" * Acc@1 {result.acc1:.3f} Acc@5 {result.acc5:.3f}",
            f"Accuracy of the network on the {images} test images: {result.acc1:.1f}%",
        ):
            print(line)
            log_file.handle(logging.makeLogRecord({"levelname": "INFO", "levelno": logging.INFO, "msg": line}))


def _throughput(options: FrontDoorOptions, cfg: CfgNode, world: World) -> None:
    from swin_quant.data.loader import load_batches
    from swin_quant.loading import load_for_scoring
    from swin_quant.score.candidate import throughput
    from swin_quant.score.engine import half_type, torch_engines
    from swin_quant.score.scoring import open_labelled

    if not options.checkpoint:
        raise UsageError("no checkpoint: give --resume FILE")
    model, policies = load_for_scoring(cfg, options.checkpoint, options.policy.policies(), world, options.replace_head)
    pictures = open_labelled(cfg, "val", world, class_names=model.class_names)
    first = [list(range(min(cfg.DATA.BATCH_SIZE, len(pictures))))]
    batch = next(load_batches(pictures, model.preprocess, first))
    if not batch.indices:
        raise SwinQuantError(f"{cfg.DATA.DATA_PATH}: the first batch is unreadable: {listed(batch.unreadable)}")
    images = batch.images.to(world.device)
    half = half_type(options.data.half, world.device)
    for label, engine in torch_engines(model.module, world.device, half, policies).items():
        rate = throughput(engine, images)
        if world.is_main:
            print(f"batch_size {len(images)} {engine.name} {label} throughput {rate:.1f} images/s")
