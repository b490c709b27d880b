"""Calibrate a model on pictures: find the range of every node, apply a policy."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import from_main
from swin_quant.base.errors import UsageError, called_in_python
from swin_quant.base.progress import log
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import SourceRecord
from swin_quant.config.defaults import families
from swin_quant.config.load import check_channels
from swin_quant.data.class_names import stated
from swin_quant.data.picture_set import PictureSet, Source, resolve_source
from swin_quant.data.preprocess import augmented
from swin_quant.data.sources import TRAIN
from swin_quant.exported import open_model
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, one_policy, tell_bits
from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.recipe import load_passes, parse_steps
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.trial import all_or_nothing, copy_state, give_state
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.verbs.calibration import draw, improved, observe_batches, take

EXAMPLES = """swin-quant calibrate swin_tiny_patch4_window7_224.pth --data-path imagenet --policy ft-mode1 --output out
swin-quant calibrate timm:resnet50 --data-path imagenet --policy cpu --output out
swin-quant calibrate my.pth --cfg my.yaml --data-path data --calibrator mse --pictures 160"""
KEPT = 16  # inputs that a wrapped module keeps
WRAPPED = "qdq-unsigned"  # the default policy of a wrapped module
NONE = "none"


@checked
def calibrate(
    model: Annotated[Model | nn.Module | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    method: Annotated[str | None, Parameter(name="--calibrator")] = None,
    percentile: float | None = None,
    exact: bool = False,
    passes: Annotated[str | Sequence[Any] | None, Parameter(accepts_keys=False)] = None,
    augment: bool = False,
    folder: Annotated[str | Path | None, Parameter(parse=False)] = None,
) -> Model:
    """Find the range of every node of a model on pictures, and apply a policy.

    The ranges do not depend on batches, workers or ranks. A warning says where the ranges lose the signal, and which
    method does better; the run card keeps all advice. In Python the model itself is changed, and an error or an
    interrupt leaves it as it was.

    Args:
        model: A model, a module of our layers, or a checkpoint of any publisher.
        pictures: A place on disk, of which 80 training pictures are drawn, or batches.
        policy: Default: ft-mode1 for a Swin, qdq-unsigned for a wrapped module, qdq for any other network.
        method: how ranges are found: max, percentile, mse or entropy (default: by bits)
        percentile: percentile of values that a range covers (default 99.99); chooses the calibrator percentile
        exact: count every value, not a sample of each picture
        passes: corrections after calibration: a recipe (fast, best, ...) or its file, or none (default: equalize,
            where there are outlier channels)
        augment: calibrate on augmented training crops, as FasterTransformer does
        folder: Where the result will be saved: refused if it would be written over the checkpoint.

    Returns:
        The calibrated model.

    Raises:
        SwinQuantError: NaN or infinity in weights or activations; the message names the module.
        UsageError: Options that contradict each other, or that the model cannot have.
    """
    chosen = one_policy(policy)
    tell_bits([chosen] if chosen else [])
    with called_in_python(calibrator="method"):
        found_by = Method.choose(method, percentile, exact)
    plan = plan_passes(passes)
    if isinstance(model, ModelFile) and (model.checkpoint or model.random_weights):
        check_channels(cfg := model.config())
        pictures = resolve_source(pictures, cfg)
        if isinstance(pictures, PictureSet) and not pictures.images:
            pictures = replace(pictures, split=pictures.split or TRAIN)
            pictures.require()  # before the model is loaded
    subject = model.load_float() if isinstance(model, ModelFile) else open_model(model)
    if folder and isinstance(model, ModelFile) and model.opened:
        place = Path(folder) / f"{subject.name}_calib.pth"
        if place.exists() and place.samefile(model.opened) and not model.opened.is_calibrated:
            raise UsageError(f"‹output› {folder}: the result would be written over {model.opened}: give another folder")
    is_named = chosen is not None
    if chosen is None:
        family = families()[subject.config.MODEL.TYPE] if subject.card.config else None
        chosen = load_policy(family.policy if family else WRAPPED)
    source = resolve_source(pictures, subject.given)
    if augment and not isinstance(source, PictureSet):
        raise UsageError("‹augment›: draws crops of pictures on disk: give a place, or batches that are augmented")
    with _restored_after_errors(subject):
        apply_policy(subject.module, chosen)
        plan = plan.for_model(subject.module)  # refused before pictures are looked for
        if isinstance(source, PictureSet):
            if source.upright not in (None, subject.preprocess.upright):
                told = "%s: calibration and the run card turn pictures differently: set DATA.UPRIGHT of its config, or "
                log.warning(told + "`upright` of its preprocess", subject.name)
            transform = augmented(subject.config, source.seed or 0) if augment else subject.preprocess
            batches = draw(source, transform, augment)
        else:
            batches = take(source, subject.prepared)
        origin = _find_origin(subject)  # before passes change its weights
        is_known = bool(subject.card.config) or subject.keep_original()
        had = subject.card if is_known and (subject.card.has_own_weights or subject.card.calibration) else None
        found = observe_batches(subject.module, batches, found_by, bool(plan.steps))
        calibration, record = improved(subject.module, found, plan, had, chosen)
        names = subject.class_names
        if batches.class_names and not names:
            with contextlib.suppress(UsageError):  # it need not say how many classes it has
                names = stated(batches.class_names, subject.classes)
        parts: dict[str, Any] = {"source": origin, "policy": chosen.to_dict(), "calibration": record}
        parts |= {"training": calibrated_again(had), "checkpoint": None, "class_names": names}
        subject.card = subject.card.with_new_weights(**parts)
        # Ranks with other kernels go on with the first rank's ranges.
        shared = from_main(copy_state(subject.module))
        give_state(subject.module, {name: value.to(subject.device) for name, value in shared.items()})
    subject.calibration, subject.file = calibration, None
    if not subject.card.config:
        subject.keep_weights()
    subject.examples = found.images[0][:KEPT].cpu() if subject.card.wrapped and found.images else None
    if not is_named:
        told = "policy %s, because none is named (%s): give that of your engine; `swin-quant show policies` lists them"
        log.info(told, chosen.name, chosen.description.rstrip("."))
    return subject


@contextlib.contextmanager
def _restored_after_errors(model: Model) -> Iterator[None]:
    """Leave the model, its weights and its ranges as they were where the block ends in an error or an interrupt."""
    before = dict(vars(model))
    try:
        with all_or_nothing(model.module):
            yield
    except BaseException:
        vars(model).update(before)
        raise


def plan_passes(passes: str | Sequence[Any] | None) -> PassPlan:
    """The passes that a verb was asked for; None: those that run by themselves. UsageError for what is none."""
    if passes == NONE:
        return PassPlan()
    if isinstance(passes, str):
        recipe = load_passes(passes)
        return PassPlan(recipe.steps, recipe=recipe)
    return PassPlan(parse_steps(() if passes is None else passes), automatic=passes is None)


def _find_origin(model: Model) -> SourceRecord | None:
    """The float file that the model was loaded from, if its weights are that file's own; else its card's source."""
    card, file = model.card, model.file
    if model.is_changed:
        return None
    if file is None or card.checkpoint is None or card.calibration or card.is_qat:
        return card.source
    kind, place = card.source["format"] if card.source else "swin-quant", str(file.resolve())
    return {"file": card.checkpoint["file"], "sha256": card.checkpoint["sha256"], "format": kind, "path": place}
