"""Loads the engine of a benchmark's child process. Late imports keep other engines' libraries out of its memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swin_quant.score.engine import Engine

if TYPE_CHECKING:
    from swin_quant.backends.backend import Backend
    from swin_quant.score.options import EngineOptions


def torch_engine(checkpoint: str, config: Mapping[str, Any], device: str = "cpu", half: str | None = None) -> Engine:
    """A checkpoint's float model in torch, in float32 or autocast to `half`."""
    import torch

    from swin_quant.checkpoint import load_float
    from swin_quant.config import from_dict
    from swin_quant.models import build_model
    from swin_quant.score.torch_engines import torch_engines

    model = build_model(from_dict(config, checkpoint))
    load_float(model, checkpoint)
    return torch_engines(model.to(device), torch.device(device), half)[half or "float32"]


def artifact_engine(file: str, backend: "Backend", options: "EngineOptions") -> Engine:
    """An artifact on the engine of `backend`, which is registered first: a new process may not know it."""
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.backends.registry import register

    return register(backend).loader(open_artifact(file), options)
