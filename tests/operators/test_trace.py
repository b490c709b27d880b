"""Operators and costs against the Swin paper's formula, and sums by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.models.geometry import read_geometry
from swin_quant.operators.trace import NotTraceable, trace


def test_macs_are_those_of_the_papers_formula(tiny_config, tiny_model):
    """Liu et al. 2021, equation 2: W-MSA 4 hwC^2 + 2 M^2 hwC; an MLP 8 hwC^2 at ratio 4."""
    g, model = read_geometry(tiny_config("swin")), tiny_model("swin")
    wanted = g.resolution(0) ** 2 * g.patch_size**2 * g.in_chans * g.embed_dim
    for stage, depth in enumerate(g.depths):
        tokens, width, window = g.resolution(stage) ** 2, g.embed_dim * 2**stage, g.window_in_use(stage)
        attention = 4 * tokens * width**2 + 2 * window**2 * tokens * width
        wanted += depth * (attention + int(2 * g.mlp_ratio * tokens * width**2))
        if stage < len(g.depths) - 1:
            wanted += tokens // 4 * 4 * width * 2 * width
    wanted += width * g.classes
    calls = trace(model, (1, g.in_chans, g.image_size, g.image_size))
    assert sum(call.macs for call in calls) == wanted


class Small(nn.Module):
    """A model whose costs are known by hand."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=2, padding=1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 5)
        self.up, self.line = nn.ConvTranspose1d(8, 2, 3), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.drop(self.conv(x)).flatten(2).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x)
        return self.fc(x[:, 0] + 1), torch.mv(x[0], self.line), self.up(x.transpose(1, 2))


def test_costs_of_a_model_of_ones_own():
    calls = {call.name: call for call in trace(Small(), (2, 4, 6, 6))}
    assert calls["mv"].macs == 36 * 8 and calls["conv_transpose1d"].macs == 2 * 36 * 8 * 2 * 3
    places, tokens = 2 * 36, 36
    assert calls["conv2d"].macs == places * 8 * (4 // 2) * 9
    assert calls["scaled_dot_product_attention"].macs == 2 * 2 * tokens * tokens * 8
    assert calls["linear"].macs == 2 * 8 * 5
    assert calls["add"].macs == calls["transpose"].macs == calls["select"].macs == 0
    assert "dropout" not in calls and calls["conv2d"].module == "conv"
    assert calls["conv2d"].outputs == ((2, 8, 6, 6),)


def test_a_model_that_asks_for_values_is_named_with_its_module():
    class Gate(nn.Module):
        def forward(self, x):
            return x * 2 if x.mean() > 0 else x

    with pytest.raises(NotTraceable, match=r"module 1: its control flow or shapes depend on data: .*meta") as error:
        trace(nn.Sequential(nn.ReLU(), Gate()), (1, 3, 4, 4))
    assert error.value.module == "1" and error.value.on_data
