"""The op against ONNX's definition written in numpy, against torch's own op, and in torch's graphs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant.fake_quant import TINY_AMAX, fake_quant, grid, is_symmetric

AMAX = st.floats(2.0**-20, 2.0**20, width=32)
VALUES = st.lists(st.floats(-(2.0**24), 2.0**24, width=32), min_size=1, max_size=50)


def onnx(x, amax, bits, narrow):
    """QuantizeLinear, DequantizeLinear of the ONNX standard: saturate(round half to even (x / scale)) * scale."""
    highest = 2 ** (bits - 1) - 1
    lowest = -highest if narrow else -highest - 1
    scale = np.float32(amax) / np.float32(highest)
    levels = np.clip(np.rint(np.float32(x) / scale), lowest, highest)
    return levels.astype(np.float32) * scale


def test_grids():
    assert [grid(8), grid(8, True), grid(4), grid(2), grid(2, True), grid(8, format="fp8")] == [
        (-128, 127), (-127, 127), (-8, 7), (-2, 1), (-1, 1), (-448, 448),
    ]  # fmt: skip
    assert all(is_symmetric(*grid(bits, narrow)) for bits in (2, 4, 8) for narrow in (False, True))
    assert not is_symmetric(-100, 155) and not is_symmetric(-129, 126)


@given(VALUES, AMAX, st.integers(2, 8), st.booleans())
def test_is_quantize_and_dequantize_of_onnx(values, amax, bits, narrow):
    x = torch.tensor(values)
    y = fake_quant(x, torch.tensor(amax), *grid(bits, narrow))
    np.testing.assert_array_equal(y.numpy(), onnx(x.numpy(), amax, bits, narrow))


@given(st.integers(1, 5), st.sampled_from([(), (4,), (2, 3)]), st.integers(2, 8), st.integers(0, 99))
def test_one_range_a_channel_is_one_range_for_each_channel(channels, rest, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(channels, *rest, generator=generator)
    amax = torch.rand(channels, *[1] * len(rest), generator=generator) + 0.1
    rows = [fake_quant(row, a.reshape(()), *grid(bits)) for row, a in zip(x, amax, strict=True)]
    assert torch.equal(fake_quant(x, amax, *grid(bits)), torch.stack(rows))


@given(st.sampled_from([0.5, 0.7, 1.0, 3.0, 11.7, 250.0]), st.integers(0, 20))
def test_differs_from_torch_at_ties_only_and_by_one_step(amax, seed):
    """torch multiplies by 1 / scale where ONNX divides, so a value on the border may fall to the other side."""
    x = amax * torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor(amax) / 127
    x[:500] = (torch.arange(500) - 250 + 0.5) * scale
    ours = fake_quant(x, torch.tensor(amax), -128, 127)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale.item(), 0, -128, 127)
    steps = ((ours - theirs) / scale).round().abs()
    at_tie = ((x.double() / scale.double()).frac().abs() - 0.5).abs() < 1e-4
    assert steps.max() <= 1 and not steps[~at_tie].any()
    assert torch.allclose(ours[steps == 0], theirs[steps == 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("narrow", "lowest"), [(False, -128.0), (True, -127.0)])
def test_saturates(narrow, lowest):
    x = torch.tensor([127.4, 128.0, 1e30, torch.inf, -127.4, -128.0, -129.0, -1e30, -torch.inf])
    y = fake_quant(x, torch.tensor(127.0), *grid(8, narrow))
    assert y.tolist() == [127, 127, 127, 127, -127, lowest, lowest, lowest, lowest]


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-30, TINY_AMAX])
def test_a_range_of_nothing_gives_zeros(amax):
    x = torch.tensor([0.0, 1e-9, 1.0, -1e30])
    assert fake_quant(x, torch.tensor(amax), -128, 127).tolist() == [0, 0, 0, 0]
    rows = fake_quant(torch.ones(2, 3), torch.tensor([[amax], [1.0]]), -128, 127)
    assert rows.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_nan_stays_nan():
    y = fake_quant(torch.tensor([torch.nan, 1.0]), torch.tensor(1.0), -128, 127)
    assert y[0].isnan() and y[1] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_computes_in_float32_and_answers_in_the_type_it_got(dtype):
    x = torch.randn(1000).to(dtype)
    y = fake_quant(x, torch.tensor(1.2345), -128, 127)
    assert y.dtype == dtype
    assert torch.equal(y, fake_quant(x.float(), torch.tensor(1.2345), -128, 127).to(dtype))


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(4, 6).t(),
    "slice": lambda: torch.randn(4, 6)[:, ::2],
    "q of qkv": lambda: torch.randn(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)[0],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "0-dim": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.kernels)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_finds_no_fault_with_the_op(layout, dtype):
    """Its schema, the fake kernel's shape, type and strides, and tracing with dynamic shapes."""
    torch.library.opcheck(fake_quant, (LAYOUTS[layout]().to(dtype), torch.tensor(1.0), -128, 127))
