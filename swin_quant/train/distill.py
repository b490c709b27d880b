"""Knowledge distillation as pure functions, and the loss of a training step that is made of them.

Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015; Tung and Mori, "Similarity-Preserving
Knowledge Distillation", 2019.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.models.registry import stages_of
from swin_quant.quant.watch import watching
from swin_quant.train.recipe import Distillation


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T, the mean over pictures. Logits [B, classes], a 0-dim loss in nats.

    T^2 keeps the gradient's size independent of the temperature.
    """
    log_student, log_teacher = (F.log_softmax(logits.float() / temperature, dim=1) for logits in (student, teacher))
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def kl_divergence_ft(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """FasterTransformer's: the mean over pictures **and** classes, and no T^2 (docs/reference, section 2.4)."""
    classes = student.shape[1]
    return kl_divergence(student, teacher, temperature) / (classes * temperature**2)


KL = {"none": kl_divergence, "ft": kl_divergence_ft}


def feature_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """How far a stage's output is from the teacher's: 0 if equal, about 1 if it says nothing of it.

    student: [B, L, C], teacher: [B, L, D]. Of equal width: mean squared error over the teacher's mean square. Else the
    same of the tokens' cosine similarities, [B, L, L], which know no width.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape != teacher.shape:
        student, teacher = (_similarities(features) for features in (student, teacher))
    return F.mse_loss(student, teacher) / teacher.square().mean()


def _similarities(features: Tensor) -> Tensor:
    directions = F.normalize(features, dim=-1)
    return directions @ directions.transpose(1, 2)


@contextmanager
def stage_outputs(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """A list that every forward inside fills with the outputs [B, L, C] of the model's stages; clear it in between."""
    found: list[Tensor] = []
    stages = stages_of(model) if wanted else {}
    with watching(stages, lambda name, stage, inputs, output: found.append(output)):
        yield found


def distillation_loss(
    recipe: Distillation, student: Tensor, teacher: Tensor, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> Tensor:
    """The teacher's part of the loss: logits [B, classes], and the stage outputs where features are distilled."""
    loss = recipe.weight * KL[recipe.compat](student, teacher, recipe.temperature)
    if recipe.features:
        distances = [feature_distance(one, other) for one, other in zip(ours, theirs, strict=True)]
        loss = loss + recipe.features * sum(distances) / len(distances)
    return loss
