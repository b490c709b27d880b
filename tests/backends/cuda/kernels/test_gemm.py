"""Products with every epilogue, against their references."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import FLOAT8, HALVES, Draw, assert_same, few, linear, maps, need_float8, operands, poisoned, seeds

from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.rows import NormQuantizeKernel
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.backends.cuda.spec import LARGEST_HEAD_DIM
from swin_quant.backends.integer_arithmetic import gelu_table


@few
@given(
    seed=seeds,
    dtype=operands,
    m=st.integers(1, 40),
    n=st.sampled_from([8, 40, 96]),
    k=st.sampled_from([16, 32, 96, 100]),
)
def test_gemm_to_int8(run, seed, dtype, m, n, k):
    draw = Draw(seed)
    arguments = linear(draw, dtype, m, n, k) | {"levels": draw.positive(n, low=20, high=60)}
    arguments |= {"epilogue": Epilogue("quantize"), "out": poisoned(torch.int8, m, n), "tiles": Tiles(16, 32, 32)}
    assert_same(run, "gemm", ["out"], arguments, exact=dtype == torch.int8)


@few
@example(seed=1, dtype=torch.int8, m=40, out=torch.bfloat16)
@given(seed=seeds, dtype=operands, m=st.integers(1, 40), out=st.sampled_from([*HALVES, torch.float32]))
def test_gemm_to_float(run, seed, dtype, m, out):
    draw = Draw(seed)
    arguments = linear(draw, dtype, m, 40, 64) | {"epilogue": Epilogue("half"), "out": poisoned(out, m, 40)}
    assert_same(run, "gemm", ["out"], arguments, exact=dtype == torch.int8)


@few
@given(seed=seeds, m=st.integers(1, 20), kind=st.sampled_from(["quantize", "gelu"]))
def test_gemm_to_float8(run, seed, m, kind):
    """Results saturate: some sums exceed the largest value."""
    need_float8(run)
    draw = Draw(seed)
    arguments = linear(draw, FLOAT8, m, 40, 64) | {"epilogue": Epilogue(kind)}
    arguments |= {word: arguments[word] * 300.0 for word in ("scale", "bias")}
    arguments |= {"levels": 300.0 if kind == "gelu" else None}
    assert_same(run, "gemm", ["out"], arguments | {"out": poisoned(FLOAT8, m, 40)})
    GemmKernel(**arguments | {"out": (out := poisoned(FLOAT8, m, 40))}).reference()
    assert out.float().max() == 448


def test_rounding_to_float8(run):
    """By brute force, every magnitude of float16 becomes the nearest value of E4M3; on a tie the even one."""
    x = torch.arange(0, 2**15, dtype=torch.int16).view(torch.float16)
    x = torch.where(x.isfinite(), x, 0) * (-1) ** torch.arange(2**15)  # all magnitudes, with alternating signs
    x = x.half().view(1, 32, 32, 32)
    values = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double()  # 0 to 448; an even code is an even mantissa
    far = (x.double().abs().view(-1, 1) - values).abs()
    far = far * 2 + torch.arange(127) % 2 * 1e-12  # the even one on a tie
    nearest = values[far.argmin(1)] * x.double().sign().flatten()
    arguments = {"x": x, "weight": None, "bias": None, "eps": 1e-5, "levels": 1.0, "windows": Windows(32, 32)}
    for name, out in (("reference", poisoned(FLOAT8, 32**2, 32)), ("kernel", poisoned(FLOAT8, 32**2, 32))):
        if name == "reference":
            NormQuantizeKernel(**arguments, out=out).reference()
        else:
            out = run("norm_quantize", ["out"], arguments | {"out": out})["out"]
        assert torch.equal(out.double().flatten(), nearest), name


@few
@given(seed=seeds, dtype=operands, m=st.integers(1, 40), to_int8=st.booleans())
def test_gemm_with_gelu(run, seed, dtype, m, to_int8):
    draw = Draw(seed)
    out = poisoned(torch.int8 if to_int8 else torch.float16, m, 64)
    levels = 35.0 if to_int8 else None
    arguments = linear(draw, dtype, m, 64, 32) | {"epilogue": Epilogue("gelu"), "out": out, "levels": levels}
    arguments |= {word: arguments[word] * (levels or 1.0) for word in ("scale", "bias")}
    assert_same(run, "gemm", ["out"], arguments)


@few
@given(seed=seeds, dtype=operands, m=maps, batch=st.integers(1, 3), in_place=st.booleans())
def test_gemm_with_residual(run, seed, dtype, m, batch, in_place):
    draw, n = Draw(seed), 24
    x = draw.real(batch, m[0], m[0], n, dtype=torch.float16)
    arguments = linear(draw, dtype, batch * m[0] ** 2, n, 32) | {"epilogue": Epilogue("residual")}
    arguments |= {"windows": Windows(*m), "residual": x, "out": x if in_place else poisoned(x.dtype, *x.shape)}
    assert_same(run, "gemm", ["out"], arguments, exact=dtype == torch.int8)


@pytest.mark.parametrize("d", [32, 64, LARGEST_HEAD_DIM])
@few
@given(seed=seeds, dtype=operands, m=st.integers(1, 20), heads=st.integers(1, 3), ft=st.booleans())
def test_gemm_to_unit_vectors(run, seed, dtype, m, heads, ft, d):
    draw, n = Draw(seed), 3 * heads * d
    arguments = linear(draw, dtype, m, n, 64) | {"out": poisoned(torch.int8, m, n)}
    arguments |= {"lengths": draw.positive(3 * heads).repeat_interleave(d), "levels": torch.full((n,), 50.0)}
    if ft:
        arguments["before"] = torch.stack([torch.full((n,), 40.0), torch.full((n,), 1 / 40)])
    arguments["epilogue"] = Epilogue("unit", head_dim=d, unit_epsilon=1e-6 if ft else None)
    if not ft or dtype == torch.int8:  # a tie before normalisation moves the whole vector
        assert_same(run, "gemm", ["out"], arguments)


@few
@given(seed=seeds, mode=st.sampled_from(["table", "half_steps", "int32", "float32"]), m=st.integers(1, 20))
def test_gemm_of_fastertransformer(run, seed, mode, m):
    draw, n, k = Draw(seed), 24, 64
    arguments = linear(draw, torch.int8, m, n, k)
    bias = arguments["bias"].half()
    how = {"product_levels": 0.002}
    out = torch.int8 if mode == "table" else torch.float32 if mode == "float32" else torch.float16
    if mode == "table":
        arguments |= {"scale": None, "bias": None, "table": gelu_table(0.02, bias, 50.0)}
    else:
        arguments |= {"scale": torch.full((n,), 0.02), "bias": bias.float()}
        how |= {"half_steps": mode == "half_steps", "product_rounds": mode != "int32"}
    arguments |= {"epilogue": Epilogue("table" if mode == "table" else "half", **how), "out": poisoned(out, m, n)}
    assert_same(run, "gemm", ["out"], arguments, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu"], indirect=True)
@few
@given(seed=seeds, m=st.integers(1, 40))
def test_gemm_of_bfloat16(run, seed, m):
    arguments = linear(Draw(seed), torch.bfloat16, m, 40, 96) | {"epilogue": Epilogue("half")}
    assert_same(run, "gemm", ["out"], arguments | {"out": poisoned(torch.bfloat16, m, 40)})
