"""The teacher of a distillation: any float checkpoint that answers in the student's classes, also a larger model."""

import torch
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint import load_float
from swin_quant.models import build_model
from swin_quant.models.layers import Swin
from swin_quant.train.recipe import Distillation


def load_teacher(
    path: str | None, cfg: CfgNode, recipe: Distillation, student: Swin, device: torch.device
) -> tuple[Swin | None, SourceRecord | None]:
    """The float model of `cfg` in `path`, if the recipe distils; UsageError where one comes without the other."""
    if recipe.weight == 0 and recipe.features == 0:
        if path:
            raise UsageError("--teacher needs a recipe that distils: set distill.weight or distill.features")
        return None, None
    if not path:
        raise UsageError("the recipe distils: give the float checkpoint of the teacher as --teacher FILE")
    with torch.random.fork_rng():  # weights that are about to be replaced leave no trace in the student's run
        teacher = build_model(cfg)
    check_teacher(student, teacher, recipe)
    source = load_float(teacher, path)
    return teacher.to(device).requires_grad_(False), source.record()


def check_teacher(student: Swin, teacher: Swin, recipe: Distillation) -> None:
    """UsageError unless the teacher answers in the student's classes and, for features, in its maps of tokens."""
    ours, theirs = student.geometry, teacher.geometry
    if ours.classes != theirs.classes:
        raise UsageError(f"--teacher: has {theirs.classes} classes, the student {ours.classes}: they must be the same")
    if ours.image_size != theirs.image_size:
        raise UsageError(f"--teacher: takes pictures of {theirs.image_size} pixels, the student of {ours.image_size}")
    maps = [[g.resolution(stage) for stage in range(len(g.depths))] for g in (ours, theirs)]
    if recipe.features and maps[0] != maps[1]:
        raise UsageError(f"--teacher: its maps of tokens are {maps[1]}, not {maps[0]}: its features cannot be used")
