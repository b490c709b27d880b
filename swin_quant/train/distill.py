"""Knowledge distillation: load the teacher, and compute its part of the loss.

Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015; Tung and Mori, "Similarity-Preserving
Knowledge Distillation", 2019.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint import load_float
from swin_quant.config.outputs import LOGITS
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import list_stages
from swin_quant.quant.watch import watching
from swin_quant.train.recipe import Distillation


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float, compat: str = "none") -> Tensor:
    """T^2 KL(teacher || student) at temperature T, the mean over pictures. Logits [B, classes], a 0-dim loss in nats.

    T^2 keeps the gradient's size independent of the temperature. `compat` ft is FasterTransformer's: the mean over
    pictures **and** classes, without T^2 (docs/reference, section 2.4).
    """
    log_student, log_teacher = (F.log_softmax(logits.float() / temperature, dim=1) for logits in (student, teacher))
    loss = F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return loss / student.shape[1] if compat == "ft" else loss * temperature**2


def feature_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """The distance of a stage's output from the teacher's: 0 if equal, about 1 if unrelated.

    student: [B, L, C], teacher: [B, L, D], or maps [B, H, W, C]. Mean squared error over the teacher's mean square. If
    the widths differ, it compares the tokens' cosine similarities [B, L, L].
    """
    student, teacher = student.float(), teacher.float()
    if student.shape != teacher.shape:
        directions = (F.normalize(features.flatten(1, -2), dim=-1) for features in (student, teacher))
        student, teacher = (each @ each.transpose(1, 2) for each in directions)
    return F.mse_loss(student, teacher) / teacher.square().mean()


@contextmanager
def stage_outputs(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Inside the context, a list to which each forward pass adds the stages' outputs [B, L, C]; clear it between
    passes."""
    found: list[Tensor] = []
    stages = list_stages(model) if wanted else {}
    with watching(stages, lambda name, stage, inputs, output: found.append(output)):
        yield found


def distillation_loss(
    recipe: Distillation, student: Tensor, teacher: Tensor, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> Tensor:
    """The teacher's part of the loss: from logits [B, classes], and from stage outputs if features are distilled."""
    loss = recipe.weight * kl_divergence(student, teacher, recipe.temperature, recipe.compat)
    if recipe.features:
        distances = [feature_distance(one, other) for one, other in zip(ours, theirs, strict=True)]
        loss = loss + recipe.features * sum(distances) / len(distances)
    return loss


def load_teacher(
    path: str | None, cfg: CfgNode, recipe: Distillation, student: Classifier, device: torch.device
) -> tuple[Classifier | None, SourceRecord | None]:
    """The float model of `cfg` from `path` if the recipe distils. UsageError for a path without distillation, or none
    with it."""
    if not recipe.on:
        if path:
            raise UsageError("‹teacher› needs a recipe that distils: set distill.weight or distill.features")
        return None, None
    if not path:
        raise UsageError(
            "the recipe distils, and the float model that was calibrated is not found: give a ‹teacher› FILE"
        )
    with torch.random.fork_rng():  # random initial weights must not draw from the student's generator
        teacher = build_model(cfg)
    check_teacher(student, teacher, recipe)
    source = load_float(teacher, path)
    return teacher.to(device).requires_grad_(False), source.record()


def check_teacher(student: Classifier, teacher: Classifier, recipe: Distillation) -> None:
    """UsageError unless the teacher has the student's classes and, to distil features, its maps of tokens."""
    if student.classes != teacher.classes:
        raise UsageError(
            f"‹teacher›: has {teacher.classes} classes, the student {student.classes}: they must be the same"
        )
    if student.input_shape != teacher.input_shape:
        raise UsageError(
            f"‹teacher›: takes pictures {list(teacher.input_shape)}, the student {list(student.input_shape)}"
        )
    ours, theirs = list(student.maps), list(teacher.maps)
    if student.output_kind == LOGITS and recipe.features and (ours != theirs or not ours):
        raise UsageError(f"‹teacher›: its maps of tokens are {theirs}, not {ours}: its features cannot be used")
