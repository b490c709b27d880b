"""Knowledge distillation: load the teacher, and compute its part of the loss.

Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint import load_float
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.train.recipe import Distillation


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float, compat: str = "none") -> Tensor:
    """T^2 KL(teacher || student) at temperature T, the mean over pictures. Logits [B, classes], a 0-dim loss in nats.

    T^2 keeps the gradient's size independent of the temperature. `compat` ft is FasterTransformer's: the mean over
    pictures **and** classes, without T^2 (docs/reference, section 2.4).
    """
    log_student, log_teacher = (F.log_softmax(logits.float() / temperature, dim=1) for logits in (student, teacher))
    loss = F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return loss / student.shape[1] if compat == "ft" else loss * temperature**2


def load_teacher(
    path: str | None, cfg: CfgNode, recipe: Distillation, student: Classifier, device: torch.device
) -> tuple[Classifier | None, SourceRecord | None]:
    """The float model of `cfg` from `path` if the recipe distils. UsageError for a path without distillation, or none
    with it."""
    if not recipe.weight:
        if path:
            raise UsageError("‹teacher› needs a recipe that distils: set distill.weight")
        return None, None
    if not path:
        raise UsageError(
            "the recipe distils, and the float model that was calibrated is not found: give a ‹teacher› FILE"
        )
    with torch.random.fork_rng():  # random initial weights must not draw from the student's generator
        teacher = build_model(cfg)
    check_teacher(student, teacher)
    source = load_float(teacher, path)
    return teacher.to(device).requires_grad_(False), source.record()


def check_teacher(student: Classifier, teacher: Classifier) -> None:
    """UsageError unless the teacher has the student's classes and takes its pictures."""
    if student.classes != teacher.classes:
        raise UsageError(
            f"‹teacher›: has {teacher.classes} classes, the student {student.classes}: they must be the same"
        )
    if student.input_shape != teacher.input_shape:
        raise UsageError(
            f"‹teacher›: takes pictures {list(teacher.input_shape)}, the student {list(student.input_shape)}"
        )
