"""Fake quantization for training: the op's values to the bit, and gradients by their definition."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from swin_quant.quant import straight_through
from swin_quant.quant.fake_quant import TINY_AMAX, fake_quant, grid, grid_between
from swin_quant.quant.straight_through import simulate

LAYOUTS = {
    "contiguous": lambda: torch.randn(64, 6, 8),
    "transposed": lambda: torch.randn(6, 64).t(),
    "q of qkv": lambda: torch.randn(40, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[0],
    "expanded": lambda: torch.randn(64, 1).expand(64, 6),
    "0-dim": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}
ENDS = [(-0.17, 3.0), (0.0, 2.0), (-2.0, 0.01), (-1.0, 0.3)]
GRIDS = {f"{ends}, {bits} bits": (ends, 2**bits - 1) for ends in ENDS for bits in (8, 4, 3)}


def check(way, x, amax, grid, low=None):
    """Values, the gradient of x (1 from the range's lower end, `low`, to amax), and that of amax: Esser et al.,
    equation 3, by the step s = amax / qmax, with the gradient scale of section 2.2."""
    x, amax, qmax = x.detach().requires_grad_(), amax.detach().requires_grad_(), grid[1]
    y = way(x, amax, *grid)
    assert torch.equal(y, fake_quant(x.detach(), amax.detach(), *grid)) and y.dtype == x.dtype
    weights = torch.linspace(-1, 2, max(y.numel(), 1))[: y.numel()].view(y.shape).to(y.dtype)
    (y * weights).sum().backward()
    values, ends = x.detach().float(), amax.detach()
    inside = (values <= ends) & (values >= (-ends if low is None else low))
    assert x.grad.dtype == x.dtype and torch.equal(x.grad, weights * inside)
    position = values / torch.where(ends > TINY_AMAX, ends / qmax, torch.inf)
    level = position.round().clamp(*grid)
    slope = torch.where(inside, level - position, level)
    each = max(x.numel(), 1) / max(amax.numel(), 1)
    wanted = (weights.float() * slope).sum_to_size(amax.shape) / qmax / (each * qmax) ** 0.5
    half_a_code = each * 2 / 504 / qmax / (each * qmax) ** 0.5 + 1e-6  # codes are 1 / 252 of dy/dscale
    torch.testing.assert_close(amax.grad, wanted, rtol=2e-3, atol=half_a_code)
    frozen = simulate(x.detach(), amax.detach(), *grid)
    assert torch.equal(frozen, y) and not frozen.requires_grad


@pytest.mark.parametrize("block", [1, 50, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_block_size_layout_and_type(monkeypatch, layout, dtype, block):
    monkeypatch.setattr(straight_through, "_BLOCK", block)
    check(simulate, LAYOUTS[layout]().to(dtype), torch.tensor(0.8), grid(8))
    if block > 50:  # it has no blocks
        check(straight_through._traced, LAYOUTS[layout]().to(dtype), torch.tensor(0.8), grid(8))


@pytest.mark.parametrize("way", [simulate, straight_through._traced])
@pytest.mark.parametrize("name", GRIDS)
def test_grids_with_a_zero_point(name, way):
    (low, high), steps = GRIDS[name]
    qmin, qmax = grid_between(low, high, steps)
    amax = torch.tensor((high - low) * qmax / steps)
    check(way, 2 * torch.randn(4000), amax, (qmin, qmax), amax * (qmin / qmax))


@given(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_a_range_for_each_row(values, amax):
    check(simulate, torch.tensor(values).view(2, 2), torch.tensor([[amax], [1.25]]), grid(4, True))


@given(st.floats(0.125, 4, width=32), st.floats(-4, 4, width=16), st.sampled_from([torch.float16, torch.bfloat16]))
@example(1.0050048828125, 1.0078125, torch.bfloat16)
def test_half_precision_compares_with_the_exact_range(amax, value, dtype):
    check(simulate, torch.tensor([value]).to(dtype), torch.tensor(amax), grid(8))


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
