"""What the process of a contender loads. Imports are late: what one engine does not need is not in its memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swin_quant.engines.engine import Engine

if TYPE_CHECKING:
    from swin_quant.engines.options import EngineOptions


def torch_engine(checkpoint: str, config: Mapping[str, Any]) -> Engine:
    """The float32 model of a checkpoint, in torch."""
    import torch

    from swin_quant.checkpoint import load_float
    from swin_quant.config import from_dict
    from swin_quant.engines.torch_engines import torch_engines
    from swin_quant.models import build_model

    model = build_model(from_dict(config, checkpoint))
    load_float(model, checkpoint)
    return torch_engines(model, torch.device("cpu"), None)["float32"]


def artifact_engine(file: str, engine: str, options: "EngineOptions") -> Engine:
    """An artifact on an engine of `backends.ENGINES`."""
    from swin_quant.backends import engine_loader
    from swin_quant.backends.artifact import open_artifact

    return engine_loader(engine)(open_artifact(file), options)
