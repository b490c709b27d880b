"""GELU and the stores of every type, one float32 value at a time, against double precision and torch."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import BYTES, FLOAT8, few, need_float8

from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.tiles import Tiles

COLUMNS = 2048
GELU_ERROR = (
    4e-7  # of values up to 1, and of y above; 2.8e-7 is the largest in the interpreter, 3.2e-7 torch's own in float32
)
ROUGH_GELU = 5.5e-5  # the error of GELU for int8, whatever y is
FLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
FLOAT32 = torch.cat([torch.linspace(-14, 14, 2**15), torch.logspace(-44, 38, 2**13), -torch.logspace(-44, 38, 2**13)])


def epilogue_of(values, kind, out, levels=None):
    """The arguments of a product of zeros: the epilogue's y is its bias, one of `values` [N] in each column."""
    zeros = torch.zeros(len(values), 32, dtype=torch.int8)
    return {
        "a": zeros[:1],
        "w": zeros,
        "scale": None,
        "bias": values.float(),
        "epilogue": Epilogue(kind),
        "out": torch.empty(1, len(values), dtype=out),
        "levels": levels,
    }


def epilogue(run, values, kind, out, levels=None):
    """Outputs of the kernel and of its reference for each of `values`."""
    arguments = epilogue_of(values, kind, out, levels)
    got = run("gemm", ["out"], arguments | {"tiles": Tiles(16, COLUMNS, 32)})["out"]
    GemmKernel(**arguments).reference()
    return got[0], arguments["out"][0]


@pytest.mark.parametrize("values", [FLOAT16[FLOAT16.isfinite()], FLOAT32], ids=["float16", "float32"])
def test_gelu_is_erfs(run, values):
    """For every float16, and float32 from the smallest to the largest."""
    got, _ = epilogue(run, values, "gelu", torch.float32)
    y = values.float().double()
    off = (got.double() - y * torch.special.ndtr(y)).abs() / y.abs().clamp_min(1)
    assert off.max() < GELU_ERROR


@pytest.mark.parametrize("levels", [20.0, 60.0])
def test_gelu_moves_few_levels(run, levels):
    """Values that differ in level from erf in double precision lie as close to a tie as the error is large, and are as
    few."""
    y = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    got, _ = epilogue(run, y * levels, "gelu", torch.int8, levels)
    y = (y * levels).double() / levels
    exact = y * torch.special.ndtr(y) * levels
    moved = got != exact.round().clamp(-128, 127).to(torch.int8)
    assert moved.double().mean() <= 2 * ROUGH_GELU * levels
    assert ((exact.frac().abs() - 0.5).abs()[moved] < ROUGH_GELU * levels + 1e-4).all()


def test_gelu_without_a_range_is_zero(run):
    """Levels of 0 are those of a range in which every value is zero; scale and bias hold them."""
    for result in epilogue(run, torch.zeros(4), "gelu", torch.int8, 0.0):
        assert not result.any()


HALVES_OF_LEVELS = [n + 0.5 for n in range(-130, 130)]


@few
@example(values=HALVES_OF_LEVELS)
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_int8_is_half_to_even_and_saturated(run, values):
    x = torch.tensor(values)
    got, reference = epilogue(run, x, "quantize", torch.int8)
    expected = torch.tensor([round(min(max(value, -128), 127)) for value in values], dtype=torch.int8)
    assert torch.equal(got, expected) and torch.equal(reference, expected)


@pytest.mark.parametrize("kind", ["quantize", "gelu"])
@pytest.mark.parametrize("out", [*BYTES, torch.float16])
def test_a_nan_stays_one_where_the_type_has_it(run, kind, out):
    """It became -128 or -448, a large value. int8 has no NaN: it becomes 0."""
    if out == FLOAT8:
        need_float8(run)
    x = torch.tensor([float("nan"), 3.0, float("nan"), 1e30, 1.0])
    for result in epilogue(run, x, kind, out, 1.0 if kind == "gelu" and out != torch.float16 else None):
        result = result.float()
        assert torch.equal(result[[0, 2]].nan_to_num(-7), torch.full((2,), 0.0 if out == torch.int8 else -7.0))
        assert result[3] == {torch.int8: 127, FLOAT8: 448}.get(out, float("inf")) and result[1] > 2.9 - (out in BYTES)
