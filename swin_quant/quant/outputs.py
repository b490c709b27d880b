"""What a model gives, whatever that is: logits [B, classes], an embedding [B, channels], or maps [B, C, H, W]."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Output: TypeAlias = "Tensor | Sequence[Tensor]"


def has_classes(model: nn.Module) -> bool:
    """Whether what a model gives are logits of classes; one that does not say is taken to give them."""
    return bool(getattr(model, "classes", 1))


def rows(output: Output) -> Tensor:
    """[B, N]: what was given, one row a picture; of several maps one behind the other."""
    if isinstance(output, Tensor):
        return output.flatten(1) if output.ndim > 2 else output
    return torch.cat([part.flatten(1) for part in output], dim=1)
