"""Eager fake quantization must equal the op, to the bit, for any block size, layout and type."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant import straight_through
from swin_quant.quant.fake_quant import fake_quant, grid
from swin_quant.quant.straight_through import simulate

LAYOUTS = {
    "contiguous": lambda: torch.randn(64, 6, 8),
    "transposed": lambda: torch.randn(6, 64).t(),
    "q of qkv": lambda: torch.randn(40, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[0],
    "expanded": lambda: torch.randn(64, 1).expand(64, 6),
    "0-dim": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}


def gradients(op, x, amax, bits=8, narrow=False):
    x, amax = x.detach().requires_grad_(), amax.detach().requires_grad_()
    y = op(x, amax, *grid(bits, narrow))
    weights = torch.linspace(-1, 2, max(y.numel(), 1))[: y.numel()].view(y.shape).to(y.dtype)
    (y * weights).sum().backward()
    return y.detach(), x.grad, amax.grad


def half_a_code(values, qmax):
    """The largest error from codes of 1 / 252 of dy/dscale in the gradient of a range over this many values."""
    return values * 2 / 504 / qmax / max(values * qmax, 1) ** 0.5 + 1e-6


@pytest.mark.parametrize("block", [1, 50, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_op(monkeypatch, layout, dtype, block):
    monkeypatch.setattr(straight_through, "_BLOCK", block)
    same_as_the_op(simulate, LAYOUTS[layout]().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_traced_form_equals_the_operator(layout, dtype):
    same_as_the_op(straight_through._traced, LAYOUTS[layout]().to(dtype))


def same_as_the_op(way, x):
    amax = torch.tensor(0.8)
    (y, of_x, of_amax), (y_op, of_x_op, of_amax_op) = (gradients(op, x, amax) for op in (way, fake_quant))
    assert torch.equal(y, y_op) and torch.equal(of_x, of_x_op)
    assert torch.allclose(of_amax, of_amax_op, rtol=2e-3, atol=half_a_code(x.numel(), 127))
    frozen = simulate(x, amax, -128, 127)
    assert torch.equal(frozen, y) and not frozen.requires_grad


@given(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_is_the_op_with_a_range_for_each_row(values, amax):
    x, ranges = torch.tensor(values).view(2, 2), torch.tensor([[amax], [1.25]])
    ours, theirs = (gradients(op, x, ranges, 4, True) for op in (simulate, fake_quant))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.allclose(ours[2], theirs[2], rtol=2e-3, atol=half_a_code(2, 7))


@pytest.mark.parametrize("op", [simulate, fake_quant])
def test_the_ranges_gradient_is_lsqs(op):
    """Esser et al., equation 3, in terms of the step s = amax / qmax, with the gradient scale of section 2.2."""
    x, amax, qmax = torch.tensor([0.3, -0.74, 1.9, -2.5, 0.0]), torch.tensor(1.4), 7
    _, _, found = gradients(op, x, amax, bits=4)
    weights, step = torch.linspace(-1, 2, 5), amax / qmax
    slopes = torch.tensor([2 - 0.3 / step, -4 + 0.74 / step, 7, -8, 0])  # 0.3 / 0.2 = 1.5 rounds to 2, -3.7 to -4
    assert found.item() == pytest.approx((weights * slopes).sum().item() / qmax / (5 * qmax) ** 0.5, rel=5e-3)


@pytest.mark.parametrize(("learns", "most"), [(False, 0.04), (True, 1.01)])  # bytes a value
def test_keeps_little_for_the_backward_pass(learns, most):
    x, amax, kept = torch.randn(1000, 100, requires_grad=True), torch.tensor(3.9, requires_grad=learns), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        simulate(x, amax, -128, 127)
    assert sum(t.numel() * t.element_size() for t in kept) < most * x.numel()


@pytest.mark.parametrize("grid", [(-128, 127), (-14, 241)])
def test_a_storage_can_be_freed_afterwards_as_a_sharded_weight_s_is(grid):
    x = torch.randn(1000).requires_grad_()
    simulate(x, torch.tensor(1.0), *grid)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().size() == 0
