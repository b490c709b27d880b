"""Kernels that read all channels of a token: norms with their sequels, the pool, and the patch embedding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import Draw, assert_same, few, halves, maps, poisoned, seeds

from swin_quant.backends.cuda.kernels.windows import Windows


@few
@given(
    seed=seeds, m=maps, batch=st.integers(1, 3), channels=st.sampled_from([8, 24, 96]), half=halves, v2=st.booleans()
)
def test_norm_quantize(run, seed, m, batch, channels, half, v2):
    draw, rows = Draw(seed), batch * m[0] ** 2
    x = draw.real(batch, m[0], m[0], channels, dtype=half)
    norm = (None, None) if v2 else (draw.real(channels), draw.real(channels))
    arguments = {"x": x, "weight": norm[0], "bias": norm[1], "eps": 1e-5, "windows": Windows(*m)}
    int8 = arguments | {"levels": 30.0, "out": poisoned(torch.int8, rows, channels)}
    assert_same(run, "norm_quantize", ["out"], int8, exact=v2)
    float_ = arguments | {"levels": None, "out": poisoned(half, rows, channels)}
    assert_same(run, "norm_quantize", ["out"], float_, exact=v2)


@few
@given(
    seed=seeds,
    batch=st.integers(1, 3),
    side=st.sampled_from([2, 6]),
    channels=st.sampled_from([8, 24]),
    v2=st.booleans(),
)
def test_merge_quantize(run, seed, batch, side, channels, v2):
    draw, rows = Draw(seed), batch * side**2 // 4
    x = draw.real(batch, side, side, channels, dtype=torch.float16)
    norm = (None, None) if v2 else (draw.real(4 * channels), draw.real(4 * channels))
    out = poisoned(torch.int8, rows, 4 * channels)
    arguments = {"x": x, "weight": norm[0], "bias": norm[1], "eps": 1e-5, "levels": 25.0, "out": out}
    assert_same(run, "merge_quantize", ["out"], arguments, exact=v2)


@few
@given(seed=seeds, m=maps, batch=st.integers(1, 3), channels=st.sampled_from([8, 24]), last=st.booleans())
def test_norm_residual(run, seed, m, batch, channels, last):
    draw, rows = Draw(seed), batch * m[0] ** 2
    y = draw.real(rows, channels, dtype=torch.float16)
    x = draw.real(batch, m[0], m[0], channels, dtype=torch.float16)
    arguments = {
        "y": y,
        "weight": draw.real(channels),
        "bias": draw.real(channels),
        "eps": 1e-6,
        "windows": Windows(*m),
    }
    if last:
        arguments |= {"residual": None, "out": poisoned(torch.float16, *x.shape)}
        assert_same(run, "norm_residual", ["out"], arguments)
    else:
        arguments |= {"residual": x, "out": x, "levels": 20.0, "out_quantized": poisoned(torch.int8, rows, channels)}
        assert_same(run, "norm_residual", ["out", "out_quantized"], arguments)


@few
@given(seed=seeds, batch=st.integers(1, 3), side=st.sampled_from([1, 3, 7]), channels=st.sampled_from([8, 48]))
def test_pool(run, seed, batch, side, channels):
    draw = Draw(seed)
    x = draw.real(batch, side, side, channels, dtype=torch.float16)
    arguments = {"x": x, "weight": draw.real(channels), "bias": draw.real(channels), "eps": 1e-5}
    assert_same(run, "pool", ["out"], arguments | {"out": poisoned(torch.float32, batch, channels)})
    factors = {"factors": draw.real(channels).abs() + 0.1, "out": poisoned(torch.float32, batch, channels)}
    assert_same(run, "pool", ["out"], arguments | factors)
    ft = {"out": poisoned(torch.float16, batch, channels), "half_steps": True}
    assert_same(run, "pool", ["out"], arguments | ft)


@pytest.mark.parametrize(("uint8", "ft"), [(False, False), (True, False), (False, True)])
@few
@given(seed=seeds, batch=st.integers(1, 3), patch=st.sampled_from([2, 4]))
def test_patch_embed(run, seed, batch, patch, uint8, ft):
    draw, side, channels = Draw(seed), 3, 24
    pixels = side * patch
    images = draw.real(batch, 3, pixels, pixels)
    if uint8:
        images = torch.randint(0, 256, (batch, pixels, pixels, 3), generator=draw.generator, dtype=torch.uint8)
    arguments = {
        "images": images,
        "weight": draw.real(channels, 3 * patch**2, dtype=torch.float16),
        "bias": draw.real(channels),
        "norm_weight": draw.real(channels),
        "norm_bias": draw.real(channels),
        "eps": 1e-5,
        "out": poisoned(torch.float16, batch, side, side, channels),
        "half_steps": ft,
    }
    if not ft:
        arguments |= {"scale": 1 / 255, "positions": draw.real(side**2, channels)}
    assert_same(run, "patch_embed", ["out"], arguments)
