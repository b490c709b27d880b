"""A folded norm computes what the norm did."""

import torch
from torch import nn

from swin_quant.quant.fold import fold
from swin_quant.quant.layer import QuantConv2d


def test_a_norm_with_a_large_epsilon_is_folded_with_it():
    model = nn.Sequential(QuantConv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.5)).eval()
    model.foldable = {"1": "0"}
    for tensor in (model[1].running_mean, model[1].running_var, *model[1].parameters()):
        tensor.data.uniform_(0.1, 1)
    images = torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        wanted = model(images)
        fold(model)
        torch.testing.assert_close(model(images), wanted)
