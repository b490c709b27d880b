"""Every kernel against its reference: random operands, outputs that held something else before.

What is made of exact sums alone has to be equal. Where floats were summed in another order before int8, the result may
be the other neighbour of a tie: the exact value lies within half a level and NEAR of it.

A GPU has its own exp and rsqrt, its compiler makes one rounding of a product and a sum, and Hopper adds float8 products
up with 14 bits: there a few values (FEW) may lie on the other side of a tie that something else was made of.
"""

import importlib
import os
from importlib.metadata import version

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from swin_quant.backends.cuda.kernels import gemm, norm_quantize
from swin_quant.backends.cuda.kernels.gemm import Epilogue, gelu_table
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.backends.cuda.tuning import kernels_hash

NEAR = 2e-3
FEW, OFF = 0.05, 2.0  # the share of such values on a GPU, and by how many levels
OF_SUMS = 2.0**-21  # of the largest: what is left of sums, or of 1 + erf, that nearly cancel, where float8 is finest
POISON = 96
FLOAT8 = torch.float8_e4m3fn
BYTES = (torch.int8, FLOAT8)
_SETTINGS = settings(
    max_examples=3,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # a failure names its draw; smaller ones would take minutes to find
)
# Other draws whenever a kernel changes, and the same ones until then; DRAWS=NUMBER asks for others.
DRAWS = int(os.environ.get("DRAWS") or int(kernels_hash()[:8], 16))
seeds = st.integers(0, 2**31)
HALVES = [torch.float16, torch.bfloat16]
halves = st.sampled_from(HALVES)
maps = st.sampled_from([(4, 2, 0), (4, 2, 1), (6, 3, 1), (5, 5, 0), (14, 7, 3)])
WINDOWS = [(7, 7, 0), (14, 7, 3), (8, 8, 0), (16, 8, 4), (12, 12, 0), (16, 16, 0), (24, 24, 0)]
WINDOWS += [pytest.param(m, marks=pytest.mark.slow) for m in ((24, 12, 6), (32, 16, 8), (48, 24, 12))]
"""Those that Swins are trained with: side of the map, window, shift."""


class Draw:
    """Tensors from one generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def int8(self, *shape):
        return torch.randint(-128, 128, shape, generator=self.generator, dtype=torch.int8)

    def operand(self, dtype, *shape):
        if dtype == FLOAT8:
            return self.real(*shape, scale=100.0).clamp(-448, 448).to(FLOAT8)
        return self.int8(*shape) if dtype == torch.int8 else self.real(*shape, dtype=dtype)

    def positive(self, *shape, low=0.5, high=2.0):
        return torch.rand(shape, generator=self.generator) * (high - low) + low


def poisoned(dtype, *shape):
    return torch.full(shape, float(POISON)).to(dtype)


def both(run, operation, outputs, arguments, widened=()):
    """(what the kernel, what the reference writes) by output. `widened`: those that the reference gives unrounded."""
    got = run(operation, outputs, {name: clone(value) for name, value in arguments.items()} | shared(arguments))
    arguments = dict(arguments) | {name: arguments[name].float() for name in widened}
    importlib.import_module(f"swin_quant.backends.cuda.kernels.{operation}").reference(**without_tiles(arguments))
    return [(got[name], arguments[name]) for name in outputs]


def clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def shared(arguments):
    """The residual stream that is read is the one that is written."""
    x = arguments["out"].clone()
    same = [name for name in ("x", "residual") if arguments.get(name) is arguments["out"]]
    return dict.fromkeys([*same, "out"], x) if same else {}


def without_tiles(arguments):
    return {name: value for name, value in arguments.items() if name != "tiles"}


def float8_level(x):
    """How far the values of E4M3 around each of x lie from each other."""
    return x.abs().clamp(2.0**-6, 448).log2().floor().exp2() / 8


def few(test):
    """A test of few draws."""
    return seed(DRAWS)(_SETTINGS(test))


def is_exact(run):
    """Whether a kernel rounds where its reference does: the interpreter."""
    return run.__name__ != "on_gpu"


def interprets_bounds():
    """Whether a loop's bounds may be values: Triton 3.6 does not take them from the arrays of NumPy 2.4."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def assert_near(run, got, exact, steps=1.0, moves=0.0):
    """int8, float8: within half a level and NEAR, `steps` times; floats: within what their type tells apart. `moves`:
    by how much more a float8 value may be off, whose levels lie closer the nearer to zero it is.
    """
    if got.dtype in BYTES:
        if got.dtype == FLOAT8:
            moves += OF_SUMS * exact.abs().max()
            exact = exact.float().clamp(-448, 448)
            level = float8_level(exact)
        else:
            exact, level, moves = exact.float().clamp(-128, 127), 1.0, 0.0
        off = (got.float() - exact).abs()
        far = off > level * (0.5 + NEAR * steps) + moves
        if is_exact(run):
            assert not far.any()
        else:
            assert far.float().mean() <= FEW and (off <= level * OFF + moves + 0.05).all()
    else:
        assert got.dtype == exact.dtype
        of_float32 = 1e-5 if is_exact(run) else 1e-3
        wide = {torch.float32: of_float32, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
        torch.testing.assert_close(got, exact, rtol=wide, atol=wide)


def assert_same(run, operation, outputs, arguments, exact=False):
    """`exact`: bit by bit where kernels round as references do, and FasterTransformer's everywhere."""
    fastertransformers = getattr(arguments.get("epilogue"), "product_levels", None) is not None
    exact = exact and (is_exact(run) or operation != "gemm" or fastertransformers)
    widened = [] if exact else [name for name in outputs if arguments[name].dtype in BYTES]
    for got, expected in both(run, operation, outputs, arguments, widened):
        if exact:
            assert torch.equal(got, expected)
        else:
            assert_near(run, got, expected)


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


@pytest.mark.parametrize("m", WINDOWS)
def test_every_window_is_gathered_and_scattered(run, m):
    draw, rows, windows = Draw(m[0]), m[0] ** 2, Windows(*m)
    x = draw.real(1, m[0], m[0], 32, dtype=torch.float16)
    norm = {"weight": None, "bias": None, "eps": 1e-5, "levels": 30.0, "windows": windows}
    assert_same(run, "norm_quantize", ["out"], norm | {"x": x, "out": poisoned(torch.int8, rows, 32)}, exact=True)
    stream = {"windows": windows, "residual": x, "out": poisoned(x.dtype, *x.shape)}
    arguments = linear(draw, torch.int8, rows, 32, 32) | stream | {"epilogue": Epilogue("residual")}
    assert_same(run, "gemm", ["out"], arguments, exact=True)
    norm = {"y": draw.real(rows, 32, dtype=torch.float16), "weight": draw.real(32), "bias": draw.real(32), "eps": 1e-6}
    assert_same(run, "norm_residual", ["out"], norm | stream)


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


SQUARES = {torch.int8: 74**2, FLOAT8: 100**2}  # of operands, in the mean


def linear(draw, dtype, m, n, k):
    """What every epilogue is given; sums of k products come to about one."""
    scale = draw.positive(n) / (k**0.5 * SQUARES.get(dtype, 1))
    return {"a": draw.operand(dtype, m, k), "w": draw.operand(dtype, n, k), "scale": scale, "bias": draw.real(n)}


operands = st.sampled_from([torch.int8, FLOAT8, torch.float16])  # bfloat16: the interpreter multiplies its bits


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
    """What it writes saturates: some sums lie beyond the largest value."""
    draw = Draw(seed)
    arguments = linear(draw, FLOAT8, m, 40, 64) | {"epilogue": Epilogue(kind), "levels": 300.0}
    assert_same(run, "gemm", ["out"], arguments | {"out": poisoned(FLOAT8, m, 40)})
    gemm.reference(**arguments | {"out": (out := poisoned(FLOAT8, m, 40))})
    assert out.float().max() == 448


def test_rounding_to_float8(run):
    """Every magnitude of float16 becomes the nearest value of E4M3, the even one of two: by brute force."""
    x = torch.arange(0, 2**15, dtype=torch.int16).view(torch.float16)
    x = torch.where(x.isfinite(), x, 0) * (-1) ** torch.arange(2**15)  # all magnitudes, signs in turns
    x = x.half().view(1, 32, 32, 32)
    values = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double()  # 0 to 448; an even code is an even mantissa
    far = (x.double().abs().view(-1, 1) - values).abs()
    far = far * 2 + torch.arange(127) % 2 * 1e-12  # the even one of two
    nearest = values[far.argmin(1)] * x.double().sign().flatten()
    arguments = {"x": x, "weight": None, "bias": None, "eps": 1e-5, "levels": 1.0, "windows": Windows(32, 32)}
    for name, out in (("reference", poisoned(FLOAT8, 32**2, 32)), ("kernel", poisoned(FLOAT8, 32**2, 32))):
        if name == "reference":
            norm_quantize.reference(**arguments, out=out)
        else:
            out = run("norm_quantize", ["out"], arguments | {"out": out})["out"]
        assert torch.equal(out.double().flatten(), nearest), name


@few
@given(seed=seeds, dtype=operands, m=st.integers(1, 40), to_int8=st.booleans())
def test_gemm_with_gelu(run, seed, dtype, m, to_int8):
    draw = Draw(seed)
    out = poisoned(torch.int8 if to_int8 else torch.float16, m, 64)
    arguments = linear(draw, dtype, m, 64, 32) | {"epilogue": Epilogue("gelu"), "out": out}
    assert_same(run, "gemm", ["out"], arguments | {"levels": 35.0 if to_int8 else None})


@few
@given(seed=seeds, dtype=operands, m=maps, batch=st.integers(1, 2), in_place=st.booleans())
def test_gemm_with_residual(run, seed, dtype, m, batch, in_place):
    draw, n = Draw(seed), 24
    x = draw.real(batch, m[0], m[0], n, dtype=torch.float16)
    arguments = linear(draw, dtype, batch * m[0] ** 2, n, 32) | {"epilogue": Epilogue("residual")}
    arguments |= {"windows": Windows(*m), "residual": x, "out": x if in_place else poisoned(x.dtype, *x.shape)}
    assert_same(run, "gemm", ["out"], arguments, exact=dtype == torch.int8)


@few
@given(seed=seeds, dtype=operands, m=st.integers(1, 20), heads=st.integers(1, 3), ft=st.booleans())
def test_gemm_to_unit_vectors(run, seed, dtype, m, heads, ft):
    draw, n = Draw(seed), 96 * heads
    arguments = linear(draw, dtype, m, n, 64) | {"out": poisoned(torch.int8, m, n)}
    arguments |= {"lengths": draw.positive(3 * heads).repeat_interleave(32), "levels": torch.full((n,), 50.0)}
    if ft:
        arguments["before"] = torch.stack([torch.full((n,), 40.0), torch.full((n,), 1 / 40)])
    arguments["epilogue"] = Epilogue("unit", unit_epsilon=1e-6 if ft else None)
    if not ft or dtype == torch.int8:  # a tie before the vector is normalised moves all of it
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


def windowed(draw, dtype, m, heads, batch=1, d=32):
    window = Windows(*m)
    rows = batch * m[0] ** 2
    return {
        "qkv": draw.operand(dtype, rows, 3 * heads * d),
        "windows": window,
        "heads": heads,
        "position_bias": draw.real(heads, window.tokens, window.tokens),
        "logits_scale": draw.positive(heads) / d**0.5 / SQUARES.get(dtype, 1),
    }


def assert_attention(run, arguments, tiled=False):
    """A probability on a tie moves the context by one level of v. `tiled`: float16 powers are rounded below another
    largest logit than the reference's, which moves it by 2^-11 of v, 0.06 of a level at most."""
    ((got, exact),) = both(run, "attention", ["out"], arguments, ["out"] if arguments["out"].dtype in BYTES else ())
    moves = 2**-11 * arguments["qkv"].float().abs().max() if tiled else 0.0
    assert_near(run, got, exact, steps=30 if tiled else 2, moves=moves)


@pytest.mark.parametrize("int8", [False, True])
@few
@given(seed=seeds, m=maps, batch=st.integers(1, 3), heads=st.integers(1, 2))
def test_attention_of_int8(run, seed, m, batch, heads, int8):
    draw = Draw(seed)
    arguments = windowed(draw, torch.int8, m, heads, batch)
    arguments["out"] = poisoned(torch.int8, batch * m[0] ** 2, 32 * heads)
    levels = {"softmax_levels": 127.0, "context_scale": 1 / 127} if int8 else {"context_scale": 1.0}
    assert_attention(run, arguments | levels)


@few
@given(seed=seeds, m=maps, probabilities=st.booleans())
def test_attention_of_float8(run, seed, m, probabilities):
    arguments = windowed(Draw(seed), FLOAT8, m, 2) | {"out": poisoned(FLOAT8, m[0] ** 2, 64), "context_scale": 1.0}
    levels = {"softmax_levels": 448.0, "context_scale": 1 / 448} if probabilities else {}
    assert_attention(run, arguments | levels, tiled=probabilities)


@few
@given(seed=seeds, m=maps)
def test_attention_of_half(run, seed, m):
    draw = Draw(seed)
    assert_attention(run, windowed(draw, torch.float16, m, 2) | {"out": poisoned(torch.float16, m[0] ** 2, 64)})


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu"], indirect=True)
@few
@given(seed=seeds, m=maps)
def test_products_of_bfloat16(run, seed, m):
    draw, half, rows = Draw(seed), torch.bfloat16, m[0] ** 2
    assert_attention(run, windowed(draw, half, m, 2) | {"out": poisoned(half, rows, 64)})
    arguments = linear(draw, half, rows, 40, 96) | {"epilogue": Epilogue("half"), "out": poisoned(half, rows, 40)}
    assert_same(run, "gemm", ["out"], arguments)


FT_LOGITS = {"logits_scale": 32**-0.5, "product_levels": 0.0006, "product_step": 0.3, "softmax_epsilon": 1e-6}


@pytest.mark.parametrize("how", ["int8", "int8 and half", "float8", "half", "fastertransformer"])
@few
@given(
    seed=seeds,
    m=st.sampled_from([(4, 2, 0), (6, 3, 1), (14, 7, 3)]),
    batch=st.integers(1, 3),
    windows=st.sampled_from([2, 4, 8, 32]),
    side=st.sampled_from([32, 64]),
)
def test_attention_of_several_windows_a_program(run, seed, m, batch, windows, side, how):
    """To the bit what one window a program is, also where their number is no multiple and where one is two tiles."""
    if is_exact(run) and not interprets_bounds():
        pytest.skip("Triton 3.6 does not interpret a loop whose bounds are values of NumPy 2.4")
    dtype = {"half": torch.float16, "float8": FLOAT8}.get(how, torch.int8)
    out = poisoned(dtype, batch * m[0] ** 2, 64)
    arguments = windowed(Draw(seed), dtype, m, 2, batch) | {"out": out.clone()}
    if how in ("int8", "fastertransformer"):
        arguments |= {"softmax_levels": 127.0, "context_scale": 1 / 127}
    arguments |= {"tiles": Tiles(side, side, windows=windows)} | (FT_LOGITS if how == "fastertransformer" else {})
    assert_attention(run, arguments, tiled=m[1] ** 2 > side)
    if is_exact(run):
        one, several = (
            run("attention", ["out"], arguments | {"tiles": Tiles(side, side, windows=n), "out": out.clone()})["out"]
            for n in (1, windows)
        )
        assert torch.equal(one.float(), several.float())


@few
@given(seed=seeds, m=maps)
def test_attention_of_fastertransformer(run, seed, m):
    """Its unfused kernels: logits through int8."""
    draw = Draw(seed)
    arguments = windowed(draw, torch.int8, m, 1) | {"out": poisoned(torch.int8, m[0] ** 2, 32)}
    assert_attention(run, arguments | FT_LOGITS | {"softmax_levels": 127.0, "context_scale": 1 / 127})


@pytest.mark.slow
@pytest.mark.parametrize(("window", "keys"), [(8, 64), (12, 32), (16, 64), (24, 64)])
@pytest.mark.parametrize("how", ["int8", "int8, no shift", "int8 and half", "float8", "half"])
def test_attention_in_tiles_of_keys(run, window, keys, how):
    draw, dtype = Draw(window), {"half": torch.float16, "float8": FLOAT8}.get(how, torch.int8)
    arguments = windowed(draw, dtype, (window, window, 0 if how.endswith("no shift") else window // 2), 1)
    arguments |= {"tiles": Tiles(128, keys), "out": poisoned(dtype, window**2, 32)}
    if how.startswith("int8") and not how.endswith("half"):
        arguments |= {"softmax_levels": 127.0 * 8, "context_scale": 1 / 127}
    assert_attention(run, arguments, tiled=how in ("int8 and half", "float8"))
