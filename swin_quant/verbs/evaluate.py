"""Score a checkpoint, or artifacts on their engines, on labelled pictures: the float model first."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from swin_quant.arguments import checked
from swin_quant.backends.registry import engine_named
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process, this_world
from swin_quant.base.errors import UsageError
from swin_quant.base.files import check_writable
from swin_quant.base.progress import log
from swin_quant.cards.card import update, with_results
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import Result
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.data.picture_set import PictureSet, Source, asked_for
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import Exported, SubjectFiles, find_checkpoint, open_subject
from swin_quant.loading import ModelFile, open_baseline
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, policies_from, tell_bits
from swin_quant.quant.watch import eval_mode
from swin_quant.report.verdict import artifact_verdict
from swin_quant.score.baseline import engines_beside
from swin_quant.score.engine import EAGER, half_type
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.evaluation import BATCH, Evaluation, Scoring, score_artifacts, score_model
from swin_quant.verbs.timing import compare_latency

EXAMPLES = """swin-quant evaluate out/my_calib.pth --data-path imagenet
swin-quant evaluate out/my_calib.pth --data-path data --policy ft-mode1 ft-mode2 qdq
swin-quant evaluate my.pth --cfg my.yaml --data-path imagenet
swin-quant evaluate out/my_int8.onnx --data-path imagenet --engine onnxruntime
swin-quant evaluate out/my_int8.onnx --no-accuracy --batch 1
torchrun --nproc_per_node 2 -m swin_quant evaluate out/my_int8.onnx --data-path imagenet --threads 1"""


@checked
def evaluate(
    model: Annotated[
        Model | nn.Module | Exported | str | Path | SubjectFiles, Fields(SubjectFiles, "model", ("files",))
    ],
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    policies: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    half: Literal["auto", "none", "float16", "bfloat16"] = "auto",
    original: Annotated[str | Path | None, Parameter(name="--float")] = None,
    engine: str | tuple[str, ...] | None = None,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    own_float: Annotated[bool, Parameter(negative="--no-own-float")] = True,
    no_accuracy: bool = False,
    batch_size: Annotated[int | None, Parameter(parse=False)] = None,
) -> Evaluation:
    """Score a model, or artifacts on their engines, on labelled pictures: float32, half precision, and quantized.

    Every engine sees the same pictures, and is compared with the float model before quantization: the one that the run
    card names, or that you name. Results are kept in the run card. A model that gives maps or an embedding needs no
    labels: it is scored by SQNR and cosine against float32.

    Args:
        model: A model, a checkpoint, an artifact, or several artifacts.
        pictures: A place on disk, of which val is scored, or batches with labels.
        policies: One or several for a checkpoint (default: its run card's).
        half: type in which the float model is scored, too; auto: the device's
        original: float checkpoint to compare with (default: the one that the run card names)
        engine: engines to run an artifact on (default: the one that it was exported for, else all that can)
        threads: threads of an engine (default: the engine chooses)
        float_type: type in which an engine that can choose runs float layers
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        own_float: also score the float model on the engine of an artifact
        no_accuracy: measure latency alone, on random inputs: no pictures are needed
        batch_size: Pictures at a time (default: 8, on a GPU 32): a latency is that of a batch in deployment.

    Returns:
        The results, the float model's first.

    Raises:
        SwinQuantError: An enabled node has no range, or an engine fails.
        UsageError: Options that do not fit the subject.
    """
    subject = model.subjects() if isinstance(model, SubjectFiles) else open_subject(model)
    source = asked_for(pictures)
    if isinstance(source, PictureSet):
        source = replace(source, batch=source.batch or batch_size or BATCH[this_world().device.type])
        if isinstance(model, SubjectFiles) and not source.images:
            source = replace(source, split=source.split or "val")
    elif batch_size is not None and not no_accuracy:
        raise UsageError("‹batch_size›: is for pictures on disk: batches have the size that they are given with")
    timed = None
    if no_accuracy:
        one_process("evaluate --no-accuracy")
        timed = (source.batch if isinstance(source, PictureSet) else batch_size) or BATCH["cpu"]
    names = (engine,) if isinstance(engine, str) else tuple(engine or ())
    for name in names:
        engine_named(name)  # a wrong name is told first
    if isinstance(subject, list | Exported):
        exported = [subject] if isinstance(subject, Exported) else subject
        if policies is not None:
            raise UsageError(f"‹policy› is not for artifacts: {exported[0].file} has its own: leave it out")
        options = EngineOptions(threads, float_type, this_world().device.type, extensions=extension)
        named = model.checkpoint if isinstance(model, SubjectFiles) else None
        how = options, half, named, str(original) if original else None, own_float, exported[0].origin, timed
        return _score_artifacts(exported, Scoring(source, names or None, *how))
    for_artifacts = {"engine": names, "threads": threads, "extension": extension, "float_type": float_type}
    for_artifacts["own_float"] = not own_float
    if wrong := [name for name, value in for_artifacts.items() if value]:
        raise UsageError(f"‹{wrong[0]}› is not for checkpoints: name an artifact")
    chosen = policies_from(policies)
    if isinstance(subject, ModelFile):
        subject = subject.load(chosen)
    chosen = chosen if policies is not None else subject.policies
    tell_bits(chosen)
    if isinstance(source, PictureSet):
        cfg = subject.given
        if cfg is not None and subject.preprocess != Preprocess.from_config(cfg):
            log.warning("preprocessing is that of the run card, which differs from the config: %s", subject.preprocess)
        scored = source.count or (cfg.DATA.SCORED or None if cfg is not None else None)
        source = replace(source.settled(cfg), count=scored)
    if subject.is_calibrated:
        check_bits(subject.module, subject.card, chosen, subject.name)
    if subject.card_file and timed is None:
        check_writable(subject.card_file)
    world = this_world(subject.device)
    baseline = open_baseline(subject, chosen, world, original, subject.given)
    before = subject.card  # which names the original now
    if timed is not None:
        engines = engines_beside(subject.module, world.device, half_type(half, world.device), chosen, baseline)
        shape = getattr(subject.module, "input_shape", None) or (3, *subject.preprocess.sides)
        with eval_mode(subject.module):
            return Evaluation((), subject.card, compare_latency(engines, timed, shape))
    found = score_model(subject, source, chosen, world, half, baseline)
    return replace(found, model=subject, before=before)


def _score_artifacts(exported: Sequence[Exported], scoring: Scoring) -> Evaluation:
    for one in exported if scoring.timed is None else ():
        check_writable(card_path(one.file))  # which gets the results
    found: Any = score_artifacts([one.artifact for one in exported], scoring)
    if scoring.timed is not None:
        return Evaluation((), exported[0].card, tuple(latency for latencies in found for latency in latencies))
    cards = []
    for one, results in zip(exported, found, strict=True):
        card = one.card
        if this_world().is_main:  # what `verify` wrote since the artifact was opened counts, too
            card = update(card_path(one.file), card, partial(with_results, results=results))
            log.info("run card: %s", card_path(one.file))
        new: tuple[Result, ...] = results
        if card.wrapped and not any(
            one.engine == EAGER for one in new
        ):  # its float, as scored on these pictures before
            new = *(one for one in card.measured() if one.engine == EAGER and one.dataset == new[0].dataset), *new
        cards.append(with_results(replace(card, results=[]), new))
    every = tuple(result for results in found for result in results)
    if len(cards) > 1:
        return Evaluation(every, cards[0], cards=tuple(cards))
    place, checkpoint = getattr(scoring.pictures, "path", "DIR"), find_checkpoint(exported[0].artifact)
    verdict = artifact_verdict(cards[0], exported[0].file, checkpoint, place)
    return Evaluation(every, cards[0], verdict=verdict)
