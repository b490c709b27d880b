"""A model's outputs: logits [B, classes], an embedding [B, channels], maps [B, C, H, W], or several of any rank."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Output: TypeAlias = "Tensor | Sequence[Tensor]"


def has_classes(model: nn.Module) -> bool:
    """Whether a model's outputs are logits of classes, as by default."""
    return bool(getattr(model, "classes", 1))


def rows(output: Output) -> Tensor:
    """The outputs as [B, N], one picture a row; several outputs are concatenated."""
    if isinstance(output, Tensor):
        return output.flatten(1) if output.ndim > 1 else output[:, None]
    return torch.cat([rows(part) for part in output], dim=1)


def named(output: Output, names: Sequence[str]) -> "Tensor | dict[str, Tensor]":
    """Outputs for a user: a single one as a tensor, several by name."""
    parts = [output] if isinstance(output, Tensor) else list(output)
    return parts[0] if len(names) == 1 else dict(zip(names, parts, strict=True))
