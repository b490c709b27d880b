"""main.py: FasterTransformer's --calib, --train, --eval and --throughput, alone or together, by our functions.

Flags that were decorative there either work here or are refused with a sentence; none is ignored.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from swin_quant.base import progress
from swin_quant.base.distributed import World, process_group, read_launcher_rank
from swin_quant.base.errors import SwinQuantError, UsageError, called, listed, memory_errors_named, speaking
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.records import ORIGINAL, PTQ
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.cli.front_door_flags import TRAINING, VERSIONS, FrontDoorParser, options_from
from swin_quant.config import find_config, load_config, to_dict
from swin_quant.config.outputs import LOGITS
from swin_quant.data.loader import load_batches
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.sources import has_split
from swin_quant.exported import SubjectFiles
from swin_quant.model import Model
from swin_quant.policies import PolicyChoice
from swin_quant.quant import INT8_MODES
from swin_quant.quant.policy import policy_from_dict
from swin_quant.score.engine import half_type, throughput, torch_engines
from swin_quant.score.scoring import open_labelled
from swin_quant.train.run import Qat, Training
from swin_quant.verbs.calibrate import NONE, calibrate
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.evaluation import Evaluation
from swin_quant.verbs.finetune import finetune

NO_SWIN_NODE = "final_input"  # in FasterTransformer's list of keywords, from BERT
REFUSED = {  # flag -> why
    "--engine": "engines are scored by `swin-quant evaluate MODEL.engine --data-path DIR`",
    "--fused_window_process": "the model has no fused window kernel; FasterTransformer's ignored the flag",
    "--fuse-qkv": "Swin has one joint qkv linear, so there is nothing to fuse; FasterTransformer's option did nothing",
}
_AUTO = "auto"


def run(arguments: Sequence[str]) -> int:
    """Run main.py. Returns 0; errors are raised."""
    parser = FrontDoorParser()
    args = parser.parse(arguments)
    progress.set_up(args.verbose, args.quiet, read_launcher_rank())
    with speaking(parser.words), process_group(args.device, args.local_rank) as world:
        with memory_errors_named():
            _refuse(args, parser.words)
            FrontDoor(args, world).run()
        sys.stdout.flush()  # flushed before this rank waits for the other ranks
    return 0


class FrontDoor:
    """One run: FasterTransformer's words as arguments of our functions, and its output folder."""

    def __init__(self, args: Namespace, world: World) -> None:
        self.args, self.world = args, world
        checkpoint = args.pretrained or (None if args.resume == _AUTO else args.resume)
        opts = (*args.opts, "TAG", args.tag) if args.tag else tuple(args.opts)
        self.file = SubjectFiles(checkpoint, args.cfg, opts=opts, replace_head=args.replace_head, device=args.device)
        how = {"seed": args.seed, "batch": args.batch_size, "workers": args.workers, "zip_mode": args.zip or None}
        how |= {"max_unreadable": args.max_unreadable, "cache_mode": args.cache_mode}
        self.place = PictureSet(args.data_path or "", **how)
        if NO_SWIN_NODE in args.quant_disable_keyword:
            told = "--quant-disable-keyword %s: left out, for no node of Swin is called so (BERT's is)"
            log.info(told, NO_SWIN_NODE)
        choice = options_from(args, PolicyChoice)  # modes are policies, keywords patterns of nodes
        keywords = (f"*{word}*" for word in args.quant_disable_keyword if word != NO_SWIN_NODE)
        named = ("float",) if args.quant_disable else (INT8_MODES[args.int8_mode],) if args.int8_mode else choice.policy
        self.policy = replace(choice, policy=named, off=(*choice.off, *keywords))
        self.policies = self.policy.load()
        self.half: Any = "none" if args.disable_amp or args.amp_opt_level == "O0" else args.half
        self.cfg = self._config()
        self.folder = Path(args.output or "output") / self.cfg.MODEL.NAME / self.cfg.TAG

    def run(self) -> None:
        args, log_file = self.args, _open_log(self.cfg, self.folder, self.world)
        if args.throughput:
            self.time()
            return
        if args.calib:
            with called(batch="--calib-batchsz"), memory_errors_named():
                model = self.calibrate()
            self.say_accuracy(self.score_calibrated(model), log_file)
            self.file = replace(self.file, checkpoint=str(model.file))
            self.cfg = self._config()
        if args.train:
            self.say_accuracy(self.train(), log_file)
        elif args.eval and not args.calib:
            if not self.file.checkpoint:
                raise UsageError("nothing to score: give --resume FILE")
            self.say_accuracy(self.score(self.file, original=args.float), log_file)

    def _config(self) -> CfgNode:
        output = {"OUTPUT": self.args.output} if self.args.output else {}
        return self.file.config(self.place.config_keys() | output)

    def calibrate(self) -> Model:
        """The first policy calibrates; the file is saved."""
        args, cfg = self.args, self.cfg
        if not self.file.checkpoint:
            raise UsageError("no checkpoint: name one by --resume or --pretrained")
        if len({tuple(rule.bits for rule in policy.rules if rule.bits) for policy in self.policies}) > 1:
            what = "ranges depend on the bits, so policies of different bits are calibrated one by one"
            raise UsageError(f"‹policy›: {what}")
        if self._is_scored():  # pictures without fitting labels are refused now, not after the calibration
            open_labelled(cfg, "val", self.world, "no", read_class_names(cfg, self.file.opened, args.replace_head))
        folder = ensure_writable_dir(args.calib_output_path or self.folder)
        count, split = args.num_calib_batch * args.calib_batchsz, args.calib_split or "train"
        sample = replace(self.place, split=split, count=count, seed=cfg.SEED, batch=args.calib_batchsz)
        percentile = args.percentile if args.calibrator in (None, "percentile") else None  # its scripts give both
        how: dict[str, Any] = {"method": args.calibrator, "percentile": percentile, "exact": args.exact_histogram}
        how |= {"passes": args.passes or NONE, "augment": args.calib_augment}  # main.py does nothing unasked
        model = calibrate(self.file, sample, self.policies[:1] or None, **how, folder=folder)
        model.save_in(folder, self.world)
        return model

    def _is_scored(self) -> bool:
        wanted = not self.args.no_eval and self.cfg.MODEL.OUTPUT_KIND == LOGITS
        return wanted and has_split(self.cfg, "val")

    def score_calibrated(self, model: Model) -> Evaluation | None:
        if not self._is_scored():
            if not self.args.no_eval:
                log.warning("not scored: %s has no val split", self.cfg.DATA.DATA_PATH)
            return None
        try:
            return self.score(model)
        except SwinQuantError as error:
            raise SwinQuantError(f"the checkpoint is calibrated and saved, but scoring it failed: {error}") from error

    def score(self, subject: Model | SubjectFiles, original: str | None = None) -> Evaluation:
        chosen = None if self.policy == PolicyChoice() else self.policy
        batch = self.cfg.DATA.BATCH_SIZE
        found = evaluate(subject, self.place, chosen, half=self.half, original=original, batch_size=batch)
        found.save_in(self.folder, self.world)
        if self.world.is_main:
            found.show()
        return found

    def train(self) -> Evaluation:
        args, qat, training = self.args, options_from(self.args, Qat), options_from(self.args, Training)
        if args.distill:  # its meaning there
            weight, compat = qat.distill_weight or 10000.0, qat.distill_compat or "ft"
            qat = replace(qat, distill_compat=compat, distill_weight=weight)
        elif not training.recipe:
            training = replace(training, set=("distill.weight=0", *training.set))
        training = replace(training, lr=args.qat_lr if training.lr is None else training.lr)
        goes_on = getattr(args, "continue") or args.resume == _AUTO
        how: dict[str, Any] = {"epochs": args.num_epochs, "resume": goes_on, "overwrite": args.overwrite}
        how |= {"amax": args.amax, "distill": args.distill, "teacher": args.teacher, "qat": qat}
        scoring: dict[str, Any] = {"half": self.half, "original": args.float, "no_eval": args.no_eval}
        tuned = finetune(self.file, self.place, self.folder, training, self.policy, **how, **scoring)
        if self.world.is_main:
            tuned.show()
        return tuned.evaluation

    def time(self) -> None:
        if not self.file.checkpoint:
            raise UsageError("no checkpoint: give --resume FILE")
        model = self.file.load(self.policies)
        pictures = open_labelled(self.cfg, "val", self.world, class_names=model.class_names)
        first = [list(range(min(self.cfg.DATA.BATCH_SIZE, len(pictures))))]
        batch = next(load_batches(pictures, model.preprocess, first))
        if not batch.indices:
            place = self.cfg.DATA.DATA_PATH
            raise SwinQuantError(f"{place}: the first batch is unreadable: {listed(batch.unreadable)}")
        images, half = batch.images.to(self.world.device), half_type(self.half, self.world.device)
        policies = self.policies or model.policies
        for label, engine in torch_engines(model.module, self.world.device, half, policies).items():
            rate = throughput(engine, images)
            if self.world.is_main:
                print(f"batch_size {len(images)} {engine.name} {label} throughput {rate:.1f} images/s")

    def say_accuracy(self, found: Evaluation | None, log_file: logging.Handler) -> None:
        """FasterTransformer's lines, for scripts that look for them: one for each policy, else one for the float
        model."""
        if found is None or not found.results or not self.world.is_main:
            return
        before = (ORIGINAL, PTQ) if found.card.is_qat else (ORIGINAL,)  # of the checkpoints that it began with
        own = [one for one in found.results if one.weights not in before and (one.policy or one.precision == "float32")]
        results = {result.policy_sha256: result for result in own}
        kept = [policy_from_dict(found.card.policy, "run card")] if found.card.policy else []
        scored = [results.get(policy.sha256) or results[None] for policy in self.policies or kept]
        for result in scored or [results[None]]:
            images = result.dataset["pictures"]
            figures = f" * Acc@1 {result.acc1:.3f} Acc@5 {result.acc5:.3f}"
            for line in (figures, f"Accuracy of the network on the {images} test images: {result.acc1:.1f}%"):
                print(line)
                log_file.handle(logging.makeLogRecord({"levelname": "INFO", "levelno": logging.INFO, "msg": line}))


def _refuse(args: Namespace, words: dict[str, str]) -> None:
    for flag, reason in REFUSED.items():
        if getattr(args, flag.strip("-").replace("-", "_")):
            raise UsageError(f"{flag}: {reason}")
    if args.quant_mode and not (args.quant_mode == "ft2" and args.int8_mode):
        raise UsageError(
            f"--quant-mode {args.quant_mode}: the default ft2 is what --int8-mode 1 or 2 chooses; no kernel of "
            "FasterTransformer's Swin runs the others: for ONNX and TensorRT there are --policy qdq and tensorrt"
        )
    if args.int8_mode and args.policy:
        raise UsageError("--int8-mode and --policy both choose the nodes: give one of them")
    if args.pretrained and args.resume and not (args.train and args.resume == _AUTO):
        raise UsageError("--pretrained and --resume both name the weights: give one of them")
    cfg = load_config(find_config(args.cfg), args.opts)
    if args.version and VERSIONS[args.version] != cfg.MODEL.TYPE:
        raise UsageError(f"--version {args.version}: the config says so itself, and MODEL.TYPE is {cfg.MODEL.TYPE}")
    if args.train and args.teacher and not (args.distill or args.recipe):
        raise UsageError("--teacher: is for --distill: add it, or leave the teacher out")
    ours = (field.name for kind in (Training, Qat) for field in fields(kind) if field.name != "amp_opt_level")
    idle = [] if args.train else [name for name in (*ours, *TRAINING) if getattr(args, name) not in (None, False, [])]
    if idle:
        raise UsageError(f"{words[idle[0]]}: is for training: add --train, or leave it out")
    if args.float and not (args.train or args.eval):
        raise UsageError("--float: is for --train and --eval: add one of them, or leave it out")
    if args.throughput and (args.calib or args.train):
        flag = "--calib" if args.calib else "--train"
        raise UsageError(f"--throughput times a checkpoint and stops: run it after {flag}, on the file that leaves")
    if args.eval and args.no_eval:
        raise UsageError("--eval and --no-eval contradict each other: give one of them")
    level = args.amp_opt_level
    if level in ("O2", "O3") and not args.train:
        raise UsageError(f"--amp-opt-level {level} is for training: evaluation has O0 and O1")
    if args.resume == _AUTO and (args.calib or not args.train):
        raise UsageError("--resume auto goes on with --train: name the checkpoint for everything else")
    if not (args.calib or args.train or args.eval or args.throughput):
        raise UsageError("nothing to do: give --calib, --train, --eval or --throughput")


def _open_log(cfg: CfgNode, folder: Path, world: World) -> logging.Handler:
    """FasterTransformer's output folder: the config as it was used, and the log of each rank, which is returned."""
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
