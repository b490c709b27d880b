"""The registry's description of Swin's parts, against the model itself."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config.family import Family
from swin_quant.models import registry
from swin_quant.models.classifier import Architecture
from swin_quant.models.registry import list_blocks, register


def test_a_name_is_taken_once_and_a_strange_model_is_of_no_architecture(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(UsageError, match="architecture 'swin': there is one of that name already"):
        register(Architecture(Family("swin", {}), lambda cfg: None))
    with pytest.raises(SwinQuantError, match="Linear: is of no registered architecture"):
        list_blocks(torch.nn.Linear(1, 1))
