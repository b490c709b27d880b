"""A model's outputs: logits [B, classes], an embedding [B, channels], maps [B, C, H, W], or several of any rank."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from swin_quant.base.errors import UsageError

Output: TypeAlias = "Tensor | Sequence[Tensor]"


def has_classes(model: nn.Module) -> bool:
    """Whether a model's outputs are logits of classes, as by default."""
    return bool(getattr(model, "classes", 1))


def rows(output: Output) -> Tensor:
    """The outputs as [B, N], one picture a row; several outputs are concatenated."""
    if isinstance(output, Tensor):
        return output.flatten(1) if output.ndim > 1 else output[:, None]
    return torch.cat([rows(part) for part in output], dim=1)


def list_tensors(output: Output) -> list[Tensor]:
    """Every tensor of the outputs."""
    return [output] if isinstance(output, Tensor) else list(output)


def cut(output: Output, sizes: Sequence[int]) -> list[Output]:
    """The outputs of a batch as those of its parts, of so many pictures each."""
    if isinstance(output, Tensor):
        return list(output.split(list(sizes)))
    return [list(column) for column in zip(*(part.split(list(sizes)) for part in output), strict=True)]


def joined(parts: Sequence[Any]) -> Any:
    """The outputs of several batches as those of one: tensors, lists of them or mappings. UsageError where sizes
    differ, as of maps of pictures of several sizes."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if not isinstance(first, Tensor):
        return [joined(column) for column in zip(*parts, strict=True)]
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        raise UsageError("outputs of these pictures are of several sizes: give the pictures one by one")
    return torch.cat(list(parts))


def named(output: Output, names: Sequence[str]) -> "Tensor | dict[str, Tensor]":
    """Outputs for a user: a single one as a tensor, several by name."""
    parts = list_tensors(output)
    return parts[0] if len(names) == 1 else dict(zip(names, parts, strict=True))
