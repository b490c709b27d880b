"""The teacher of a distillation: any float checkpoint that answers in the student's classes, also a larger model."""

import torch
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint import load_float
from swin_quant.config.outputs import LOGITS
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.train.recipe import Distillation


def load_teacher(
    path: str | None, cfg: CfgNode, recipe: Distillation, student: Classifier, device: torch.device
) -> tuple[Classifier | None, SourceRecord | None]:
    """The float model of `cfg` in `path`, if the recipe distils; UsageError where one comes without the other."""
    if not recipe.on:
        if path:
            raise UsageError("‹teacher› needs a recipe that distils: set distill.weight or distill.features")
        return None, None
    if not path:
        raise UsageError(
            "the recipe distils, and the float model that was calibrated is not found: give a ‹teacher› FILE"
        )
    with torch.random.fork_rng():  # weights that are about to be replaced leave no trace in the student's run
        teacher = build_model(cfg)
    check_teacher(student, teacher, recipe)
    source = load_float(teacher, path)
    return teacher.to(device).requires_grad_(False), source.record()


def check_teacher(student: Classifier, teacher: Classifier, recipe: Distillation) -> None:
    """UsageError unless the teacher answers in the student's classes and, for features, in its maps of tokens."""
    if student.classes != teacher.classes:
        raise UsageError(
            f"‹teacher›: has {teacher.classes} classes, the student {student.classes}: they must be the same"
        )
    if student.image_size != teacher.image_size:
        raise UsageError(
            f"‹teacher›: takes pictures of {teacher.image_size} pixels, the student of {student.image_size}"
        )
    ours, theirs = list(student.maps), list(teacher.maps)
    if student.output_kind == LOGITS and recipe.features and (ours != theirs or not ours):
        raise UsageError(f"‹teacher›: its maps of tokens are {theirs}, not {ours}: its features cannot be used")
