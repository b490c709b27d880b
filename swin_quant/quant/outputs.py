"""A model's outputs: logits [B, classes], an embedding [B, channels], or maps [B, C, H, W]."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Output: TypeAlias = "Tensor | Sequence[Tensor]"


def has_classes(model: nn.Module) -> bool:
    """Whether a model's outputs are logits of classes, as by default."""
    return bool(getattr(model, "classes", 1))


def rows(output: Output) -> Tensor:
    """The outputs as [B, N], a picture a row; several maps one behind the other."""
    if isinstance(output, Tensor):
        return output.flatten(1) if output.ndim > 2 else output
    return torch.cat([part.flatten(1) for part in output], dim=1)
