"""The registry's description of Swin's parts, against the model itself."""

import pytest
import torch
from norm_pairs import pairs_of

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config.family import Family
from swin_quant.models import registry
from swin_quant.models.classifier import Architecture
from swin_quant.models.layers import LayerNorm
from swin_quant.models.registry import get_architecture, list_blocks, list_stages, register
from swin_quant.quant.layer import QuantLinear


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_blocks_and_stages_are_swin_s(tiny_model, kind):
    model = tiny_model(kind)
    assert get_architecture(model).name == kind
    assert list(list_blocks(model).values()) == [block for layer in model.layers for block in layer.blocks]
    assert list(list_stages(model).values()) == list(model.layers)


def test_a_factor_moves_from_a_norm_to_its_linears_and_nothing_changes(tiny_model):
    """The definition of a pair: halve the norm's output, double the linears' factor."""
    model, images = tiny_model("swin"), torch.randn(2, 3, 32, 32)
    pairs = pairs_of(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, LayerNorm)]
    assert set(pairs) == set(norms) - {"patch_embed.norm", "norm"}
    with torch.no_grad():
        before = model(images)
        for norm, linears in pairs.items():
            norm = model.get_submodule(norm)
            norm.weight.mul_(0.5)
            norm.bias.mul_(0.5)
            for name in linears:
                linear = model.get_submodule(name)
                assert isinstance(linear, QuantLinear)
                linear.weight.mul_(2.0)
        torch.testing.assert_close(model(images), before)
    assert pairs_of(tiny_model("swinv2")) == {}


def test_a_name_is_taken_once_and_a_strange_model_is_of_no_architecture(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(UsageError, match="architecture 'swin': there is one of that name already"):
        register(Architecture(Family("swin", {}), lambda cfg: None))
    with pytest.raises(SwinQuantError, match="Linear: is of no registered architecture"):
        list_blocks(torch.nn.Linear(1, 1))
