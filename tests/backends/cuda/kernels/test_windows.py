"""Addresses and attention against the models' own functions."""

import pytest
import torch
import torch.nn.functional as F

from swin_quant.backends.cuda.kernels.attention import AttentionKernel
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.models import maps

MAPS = [(4, 2, 0), (4, 2, 1), (6, 3, 1), (14, 7, 3), (7, 7, 0), (16, 8, 4), (24, 12, 6), (32, 16, 8), (48, 24, 12)]


@pytest.mark.parametrize("m", MAPS)
def test_attention_is_that_of_the_model(m):
    side, window, shift = m
    heads, length = 2, window * window
    qkv = torch.randn(2 * side * side, 3 * heads * 32, generator=torch.Generator().manual_seed(side))
    bias = torch.randn(heads, length, length, generator=torch.Generator().manual_seed(window))
    q, k, v = qkv.view(-1, length, 3, heads, 32).permute(2, 0, 3, 1, 4)
    mask = (
        maps.mask(side, side, (window, window), (shift, shift))
        if shift
        else torch.zeros((side // window) ** 2, length, length)
    )
    added = bias + mask.repeat(2, 1, 1)[:, None]
    expected = F.scaled_dot_product_attention(q, k, v, added, scale=0.3).transpose(1, 2).flatten(2).flatten(0, 1)
    out = torch.full_like(expected, torch.nan)
    AttentionKernel(qkv, out, Windows(*m), heads, 0.3, bias).reference()
    torch.testing.assert_close(out, expected)


def test_unit_vectors_are_those_of_normalize():
    y = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    y[0, :32] = 0  # length 0: stays unchanged
    out, eye = torch.empty(5, 192), torch.eye(192)
    lengths = torch.tensor([2.0, 3.0, 1.0, 1.0, 0.0, 0.0]).repeat_interleave(32)
    GemmKernel(y, eye, None, None, Epilogue("unit"), out, lengths=lengths).reference()
    unit = F.normalize(y.view(5, 6, 32), dim=-1) * lengths.view(6, 32)
    torch.testing.assert_close(out, torch.cat([unit[:, :4], y.view(5, 6, 32)[:, 4:]], 1).flatten(1))
