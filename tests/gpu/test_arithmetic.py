"""Fake quantization on a GPU equals a CPU's: levels to the bit, gradients by a mask instead of positions."""

import pytest
import torch

from swin_quant.quant.fake_quant import FORMATS, grid
from swin_quant.quant.straight_through import _traced, simulate

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
LAYOUTS = {
    "contiguous": lambda: torch.randn(64, 6, 8),
    "q of qkv": lambda: torch.randn(40, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[0],
    "empty": lambda: torch.randn(0, 3),
}


def on(device, op, x, amax, format="int8"):
    """Values, gradient of x and gradient of the range, moved to the CPU."""
    x, amax = x.to(device).requires_grad_(), amax.to(device).requires_grad_()
    y = op(x, amax, *grid(8, format=format))
    weights = torch.linspace(-1, 2, max(y.numel(), 1))[: y.numel()].view(y.shape)
    (y * weights.to(y)).sum().backward()
    return y.detach().cpu(), x.grad.cpu(), amax.grad.cpu()


@TYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [simulate, _traced], ids=["eager", "traced"])
def test_levels_and_gradients_are_those_of_a_cpu(gpu, op, layout, format, dtype):
    x, amax = LAYOUTS[layout]().to(dtype), torch.tensor(0.8)
    ours, theirs = on(gpu, op, x, amax, format), on("cpu", op, x, amax, format)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2], rtol=5e-3, atol=1e-3)


def test_a_range_for_each_row(gpu):
    x, amax = torch.randn(5, 7), torch.rand(5, 1) + 0.1
    ours, theirs = on(gpu, simulate, x, amax), on("cpu", simulate, x, amax)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2], rtol=5e-3, atol=1e-3)
