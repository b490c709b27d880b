"""The model or artifact that a function of Python is given: one in memory, a file, or, refused in a line, something
else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError

if TYPE_CHECKING:
    from swin_quant.exported import Exported
    from swin_quant.model import Model


def model_of(given: Any) -> Model:
    """A Model, a module of our layers, or the checkpoint in a file. UsageError names the call for anything else."""
    from swin_quant.exported import Exported

    found = subject_of(given)
    if isinstance(found, Exported):
        raise UsageError(f"{found.file}: is an artifact, and this needs the model: give sq.load(CHECKPOINT)")
    return found


def subject_of(given: Any) -> Model | Exported:
    """A model, as `model_of`, or an artifact, in memory or in a file."""
    from torch import nn

    from swin_quant.cli.shared import is_checkpoint
    from swin_quant.exported import Exported, artifact
    from swin_quant.loading import load
    from swin_quant.model import Model
    from swin_quant.quant.quantizer import named_nodes
    from swin_quant.score.engine import Engine

    if isinstance(given, Model | Exported):
        return given
    if isinstance(given, str | Path):
        return load(given) if is_checkpoint(str(given)) else artifact(given)
    if isinstance(given, nn.Module):
        if not named_nodes(given):
            raise UsageError(f"{type(given).__name__}: has no node to quantize: give sq.wrap(module, SIZE)")
        return Model(given)
    if isinstance(given, Engine):
        raise UsageError(f"{given.name}: is a loaded engine: give the artifact, sq.artifact(FILE)")
    if isinstance(given, Mapping):
        raise UsageError("a state dict holds weights alone: torch.save it to a file, and give sq.load(FILE)")
    raise UsageError(f"{type(given).__name__}: is no model: give sq.load(CHECKPOINT), sq.wrap(module, SIZE) or a file")
