"""Fused kernels against their references, and to the bit against the kernels that they replace.

They round at the same places. Norms over more channels than one part are summed in another order, so a value on a tie
between two int8 may become the other one, which moves a sum with it by one weight.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import (
    BYTES,
    FEW,
    FLOAT8,
    LARGEST_WEIGHT,
    NEAR,
    Draw,
    both,
    few,
    float8_level,
    is_exact,
    linear,
    operands,
    poisoned,
    seeds,
    windowed,
)

from swin_quant.backends.cuda.kernels.gemm import Epilogue
from swin_quant.backends.cuda.kernels.tiles import Tiles, column_groups
from swin_quant.backends.cuda.kernels.windows import Windows

maps = st.sampled_from([(4, 2, 0), (4, 2, 1), (6, 3, 1), (5, 5, 0)])
widths = st.sampled_from([32, 96])


def near(run, operation, outputs, arguments, steps):
    """`steps`: levels by which one operand byte on the other side of a tie moves a result. In float8, whose levels are
    far apart, one value in a hundred may be another's neighbour."""
    rounded = [name for name in outputs if arguments[name].dtype in BYTES]
    for got, exact in both(run, operation, outputs, arguments, rounded):
        if got.dtype == torch.int8:
            assert ((got.float() - exact.clamp(-128, 127)).abs() <= 0.5 + NEAR + steps).all()
        elif got.dtype == FLOAT8:
            exact, level = exact.clamp(-448, 448), float8_level(exact)
            off = (got.float() - exact).abs()
            assert (off <= level * (0.5 + NEAR)).float().mean() > 0.99 and (off <= level * 1.5 + 0.05).all()
        else:
            assert (got.float() - exact.float()).abs().max() <= 4e-3 * exact.float().abs().max() + steps


def norm_of(draw, channels):
    return {"norm_weight": draw.real(channels), "norm_bias": draw.real(channels), "eps": 1e-5}


def prologue(draw, dtype, m, batch, channels, n, kind, v2):
    """norm_gemm's arguments, and the step that a moved token makes."""
    x = draw.real(batch, m[0], m[0], channels, dtype=torch.float16)
    arguments = {"norm_weight": None, "norm_bias": None, "eps": 0.0} if v2 else norm_of(draw, channels)
    arguments |= linear(draw, dtype, 1, n, channels) | {"x": x, "windows": Windows(*m), "epilogue": Epilogue(kind)}
    arguments |= {"input_levels": 30.0 if dtype in BYTES else None, "out": poisoned(dtype, batch * m[0] ** 2, n)}
    if dtype in BYTES and kind == "gelu":
        arguments |= {"levels": 35.0, **{word: arguments[word] * 35.0 for word in ("scale", "bias")}}
    elif dtype in BYTES:
        arguments["levels"] = draw.positive(n, low=20, high=60)
    if kind == "unit":
        arguments["lengths"] = draw.positive(n // 32).repeat_interleave(32)
    del arguments["a"]
    return arguments


def epilogue(draw, dtype, m, batch, channels, k, post):
    """gemm_norm's arguments."""
    quantized = FLOAT8 if dtype == FLOAT8 else torch.int8
    rows, x = batch * m[0] ** 2, draw.real(batch, m[0], m[0], channels, dtype=torch.float16)
    arguments = linear(draw, dtype, rows, channels, k) | norm_of(draw, channels) | {"windows": Windows(*m)}
    arguments |= {"residual": x, "out": x, "levels": 20.0, "post": post}
    return arguments | {"out_quantized": poisoned(quantized, rows, channels)}


def whole_attention(draw, dtype, m, batch, channels, post, heads=2):
    """attention_norm's arguments; q, k and v in the type of the weights."""
    arguments = epilogue(draw, dtype, m, batch, channels, 32 * heads, post) | windowed(draw, dtype, m, heads, batch)
    levels = {torch.int8: (127.0, 1 / 127), FLOAT8: (448.0, 1 / 448)}.get(dtype, (None, 1.0))
    del arguments["a"]
    return arguments | {"softmax_levels": levels[0], "context_scale": levels[1]}


def whole_mlp(draw, dtype, side, batch, channels, v2):
    """mlp's arguments."""
    rows, x = batch * side**2, draw.real(batch, side, side, channels, dtype=torch.float16)
    first, second = (
        linear(draw, dtype, rows, *shape) for shape in ((2 * channels, channels), (channels, 2 * channels))
    )
    norm = norm_of(draw, channels) if v2 else {}
    levels = 35.0 if dtype in BYTES else None
    return norm | {
        "a": first["a"],
        "w1": first["w"],
        **{f"{word}1": first[word] * (levels or 1.0) for word in ("scale", "bias")},
        **{word: second[word] for word in ("w", "scale", "bias")},
        "hidden_levels": levels,
        "residual": x,
        "out": x,
    }


@few
@example(seed=1, dtype=FLOAT8, m=(4, 2, 1), batch=2, channels=32, kind=False, v2=False)
@example(seed=2, dtype=FLOAT8, m=(4, 2, 1), batch=1, channels=96, kind=True, v2=False)
@example(seed=3, dtype=FLOAT8, m=(5, 5, 0), batch=3, channels=32, kind=False, v2=True)
@given(
    seed=seeds, dtype=operands, m=maps, batch=st.integers(1, 3), channels=widths, kind=st.booleans(), v2=st.booleans()
)
def test_norm_and_linear(run, seed, dtype, m, batch, channels, kind, v2):
    kind = ("gelu" if kind else "unit") if v2 else ("gelu" if kind else "quantize" if dtype in BYTES else "half")
    arguments = prologue(Draw(seed), dtype, m, batch, channels, 96, kind, v2)
    if v2 and dtype == torch.int8 and kind != "gelu":
        near(run, "norm_gemm", ["out"], arguments, NEAR)
    else:
        levels = 1 if kind == "gelu" else 60  # scales of GELU hold them
        step = LARGEST_WEIGHT * levels * arguments["scale"].max().item() if dtype == torch.int8 else 1e-2
        near(run, "norm_gemm", ["out"], arguments, step)


@few
@example(seed=1, dtype=FLOAT8, side=4, batch=2, channels=32, v2=True)
@example(seed=2, dtype=torch.int8, side=3, batch=3, channels=96, v2=False)  # parts of 32: a neighbour has three
@given(seed=seeds, dtype=operands, side=st.integers(1, 5), batch=st.integers(1, 3), channels=widths, v2=st.booleans())
def test_merging_and_its_linear(run, seed, dtype, side, batch, channels, v2):
    draw, out = Draw(seed), torch.float16
    arguments = prologue(draw, dtype, (side, side, 0), batch, 4 * channels, 2 * channels, "half", v2)
    arguments |= {"x": draw.real(batch, 2 * side, 2 * side, channels, dtype=out), "bias": None}
    arguments |= {"levels": None, "out": poisoned(out, batch * side**2, 2 * channels)}
    step = LARGEST_WEIGHT * arguments["scale"].max().item() if dtype == torch.int8 else 1e-2
    near(run, "norm_gemm", ["out"], arguments, step)


@few
@example(seed=1, dtype=FLOAT8, m=(4, 2, 1), batch=2, channels=96, post=False, last=False)
@example(seed=2, dtype=FLOAT8, m=(5, 5, 0), batch=3, channels=32, post=True, last=False)
@example(seed=3, dtype=torch.int8, m=(4, 2, 0), batch=1, channels=32, post=True, last=True)
@given(
    seed=seeds, dtype=operands, m=maps, batch=st.integers(1, 3), channels=widths, post=st.booleans(), last=st.booleans()
)
def test_linear_residual_and_norm(run, seed, dtype, m, batch, channels, post, last):
    arguments = epilogue(Draw(seed), dtype, m, batch, channels, 64, post)
    outputs = ["out", "out_quantized"]
    if post and last:  # V2's merging: only a norm
        arguments |= {"residual": None, "out": poisoned(torch.float16, *arguments["out"].shape), "out_quantized": None}
        outputs = ["out"]
    near(run, "gemm_norm", outputs, arguments, 0.05)  # a tie in half precision moves its norm


@few
@example(seed=1, dtype=FLOAT8, m=(4, 2, 1), batch=2, channels=96, post=False)
@example(seed=2, dtype=torch.int8, m=(14, 7, 3), batch=1, channels=32, post=True)
@example(seed=3, dtype=torch.int8, m=(7, 7, 0), batch=1, channels=192, post=False)  # two programs a window
@given(seed=seeds, dtype=operands, m=maps, batch=st.integers(1, 3), channels=widths, post=st.booleans())
def test_attention_projection_and_norm(run, seed, dtype, m, batch, channels, post):
    arguments = whole_attention(Draw(seed), dtype, m, batch, channels, post)
    step = LARGEST_WEIGHT * arguments["scale"].max().item() * 20.0 if dtype == torch.int8 else 0.05
    near(run, "attention_norm", ["out", "out_quantized"], arguments, step)


@few
@example(seed=1, dtype=FLOAT8, side=3, batch=2, channels=96, v2=False)
@example(seed=2, dtype=FLOAT8, side=3, batch=1, channels=96, v2=True)
@example(seed=3, dtype=FLOAT8, side=7, batch=1, channels=256, v2=False)
@example(seed=4, dtype=FLOAT8, side=7, batch=1, channels=256, v2=True)
@given(
    seed=seeds,
    dtype=operands,
    side=st.sampled_from([1, 3, 7]),
    batch=st.integers(1, 3),
    channels=st.just(96),
    v2=st.booleans(),
)
def test_mlp(run, seed, dtype, side, batch, channels, v2):
    arguments = whole_mlp(Draw(seed), dtype, side, batch, channels, v2)
    step = LARGEST_WEIGHT * arguments["scale"].max().item() if dtype == torch.int8 else 1e-2
    near(run, "mlp", ["out"], arguments, step * (4 if v2 else 1))  # the norm of a branch with values of about one


def with_bfloat16(arguments):
    """The stream in bfloat16; shared tensors stay shared."""
    halves = {id(one): one for one in arguments.values() if getattr(one, "dtype", None) == torch.float16}
    made = {key: one.bfloat16() for key, one in halves.items()}
    return {word: made.get(id(value), value) for word, value in arguments.items()}


@few
@given(seed=seeds, m=st.sampled_from([(4, 2, 1), (6, 3, 1), (5, 5, 0)]), v2=st.booleans())
def test_int8_with_a_bfloat16_stream(run, seed, m, v2):
    """One step of a bfloat16 value of 4 is 1/32, as much as a context on the other side of a tie moves it."""
    draw, int8 = Draw(seed), torch.int8
    tokens = prologue(draw, int8, m, 2, 96, 96, "unit" if v2 else "quantize", v2)
    near(run, "norm_gemm", ["out"], with_bfloat16(tokens), LARGEST_WEIGHT * 60 * tokens["scale"].max().item())
    rows = with_bfloat16(epilogue(draw, int8, m, 2, 96, 64, post=v2))
    near(run, "gemm_norm", ["out", "out_quantized"], rows, 0.1)
    near(run, "attention_norm", ["out"], with_bfloat16(whole_attention(draw, int8, m, 2, 96, post=v2)), 0.1)
    near(run, "mlp", ["out"], with_bfloat16(whole_mlp(draw, int8, m[0], 2, 96, v2)), 0.1)


def assert_equal(run, got, other):
    if is_exact(run):
        assert torch.equal(got, other)
    else:
        assert (got == other).float().mean() > 1 - FEW
        torch.testing.assert_close(got.float(), other.float(), rtol=2e-3, atol=1.0 if got.dtype == torch.int8 else 0.02)


def assert_as_apart(run, whole):
    """attention_norm's results are those of attention and gemm_norm."""
    words = ("qkv", "windows", "heads", "logits_scale", "position_bias", "softmax_levels", "context_scale")
    context = poisoned(whole["w"].dtype, len(whole["qkv"]), whole["w"].shape[1])
    before = run("attention", ["out"], {word: whole[word] for word in words} | {"out": context})["out"]
    behind = {word: value for word, value in whole.items() if word == "windows" or word not in words} | {"a": before}
    apart, found = (
        run(operation, ["out", "out_quantized"], arguments)
        for operation, arguments in (("gemm_norm", behind), ("attention_norm", whole))
    )
    for word in apart:
        assert_equal(run, found[word], apart[word])


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8, torch.float16])
@pytest.mark.parametrize("post", [False, True])
def test_attention_with_its_projection_equals_them_apart(run, dtype, post):
    """Also with several parts of columns: both sum a norm's parts in one order, while float products add up in
    another."""
    whole = whole_attention(Draw(3), dtype, (6, 3, 1), 2, 96, post)
    if dtype == torch.int8:
        assert_as_apart(run, whole)
    else:
        near(run, "attention_norm", ["out", "out_quantized"], whole, 0.05)


@pytest.mark.kernels
def test_several_tiles_of_columns_a_program(run):
    """With enough rows, a program normalises its rows once for several tiles."""
    assert column_groups(4 * 23**2, 64, 16, 32) == 1
    arguments = prologue(Draw(1), torch.int8, (23, 23, 0), 4, 32, 64, "quantize", v2=True)
    near(run, "norm_gemm", ["out"], arguments | {"tiles": Tiles(16, 32, 32)}, 0.0)


@pytest.mark.parametrize("tiles", [1, 3, 9, 12, 36])
@pytest.mark.parametrize("m", [1, 49, 784, 6272, 100352])
def test_columns_are_divided_equally(m, tiles):
    groups = column_groups(m, 64 * tiles, 64, 64)
    assert tiles % groups == 0
    assert groups == tiles or -(-m // 64) * groups >= 128
