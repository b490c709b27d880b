"""Run kernels against their references: random operands, and outputs with other content before.

Results of exact sums must be equal. If floats were summed in another order before int8, a result may be the other
neighbour of a tie: the exact value is within half a level and NEAR of it.

A GPU has its own exp and rsqrt, its compiler fuses multiply and add, and Hopper adds float8 products with 14 bits: a
few values (FEW) may come from another side of a tie.
"""

import os
from importlib.metadata import version

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from swin_quant.backends.cuda.gpu import OLDEST
from swin_quant.backends.cuda.kernels import KERNELS
from swin_quant.backends.cuda.kernels.attention import bias_row
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.quant.fake_quant import FP8

NEAR = 2e-3
FEW, OFF = 0.05, 2.0  # the share of such values on a GPU, and their distance in levels
OF_SUMS = 2.0**-21  # of the largest: the rest of sums, or of 1 + erf, that nearly cancel, where float8 is finest
TIE = 2.0**-20  # relative: attention's exp, sum, quotient and product err by up to two float32 steps each
POISON = 96
FLOAT8 = torch.float8_e4m3fn
BYTES = (torch.int8, FLOAT8)
LARGEST_WEIGHT = 128
NO_FLOAT8 = "this GPU has no float8"
_SETTINGS = settings(
    max_examples=int(os.environ.get("KERNEL_DRAWS", 3)),  # `make kernels` draws more
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # a failure names its draw; shrinking it would take minutes
)
seeds = st.integers(0, 2**31)
HALVES = [torch.float16, torch.bfloat16]
halves = st.sampled_from(HALVES)
maps = st.sampled_from([(4, 2, 0), (4, 2, 1), (6, 3, 1), (5, 5, 0), (14, 7, 3)])
WINDOWS = [(7, 7, 0), (14, 7, 3), (8, 8, 0), (16, 8, 4), (12, 12, 0), (16, 16, 0), (24, 24, 0)]
WINDOWS += [pytest.param(m, marks=pytest.mark.slow) for m in ((24, 12, 6), (32, 16, 8), (48, 24, 12))]
"""Side of the map, window and shift with which Swins are trained."""


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
    """(kernel's, reference's results) by output. `widened`: outputs that the reference gives unrounded."""
    got = run(operation, outputs, {name: clone(value) for name, value in arguments.items()} | shared(arguments))
    arguments = dict(arguments) | {name: arguments[name].float() for name in widened}
    KERNELS[operation](**without_tiles(arguments)).reference()
    return [(got[name], arguments[name]) for name in outputs]


def clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def shared(arguments):
    """The residual stream's input and output are one tensor."""
    x = arguments["out"].clone()
    same = [name for name in ("x", "residual") if arguments.get(name) is arguments["out"]]
    return dict.fromkeys([*same, "out"], x) if same else {}


def without_tiles(arguments):
    return {name: value for name, value in arguments.items() if name != "tiles"}


def float8_level(x):
    """The distance of the E4M3 values around each of x."""
    return x.abs().clamp(2.0**-6, 448).log2().floor().exp2() / 8


def few(test):
    """A test with few draws."""
    return _SETTINGS(test)


def is_exact(run):
    """Whether a kernel rounds as its reference does: in the interpreter."""
    return run.__name__ != "on_gpu"


def has_float8():
    return torch.cuda.get_device_capability() >= OLDEST[FP8]


def need_float8(run):
    """For tests with only float8 draws: a test without a draw fails."""
    if not is_exact(run) and not has_float8():
        pytest.skip(NO_FLOAT8)


def interprets_bounds():
    """Whether a loop's bounds may be values: Triton 3.6 does not take them from NumPy 2.4's arrays."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def assert_near(run, got, exact, steps=1.0, moves=0.0):
    """int8, float8: within half a level and NEAR, `steps` times; floats: within their type's precision. `moves`:
    additional tolerance of int8 or float8 values."""
    if got.dtype in BYTES:
        if got.dtype == FLOAT8:
            moves += OF_SUMS * exact.abs().max()
            exact = exact.float().clamp(-448, 448)
            level = float8_level(exact)
        else:
            exact, level = exact.float().clamp(-128, 127), 1.0
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


def attention_moves(arguments, tiled):
    """The tolerance of attention's `out`. A probability within TIE of a tie moves its row by a level times v; logits
    are equal to the bit. Float16 powers move it by 2^-11 of v if float32 before was one step off or, if `tiled`, below
    another largest logit than the reference's."""
    moves = of_ties(arguments) if arguments.get("softmax_levels") else 0.0
    if tiled or not arguments.get("softmax_levels"):
        moves += 2**-11 * arguments["qkv"].float().abs().max()
    return moves


def of_ties(arguments):
    """float32, shaped like `out`: the reference's sums of -|v| with probabilities TIE lower, minus those with
    probabilities TIE higher."""
    qkv, levels = arguments["qkv"].clone(), arguments["softmax_levels"]
    v = qkv[:, qkv.shape[1] // 3 * 2 :]
    v.copy_(-v.float().abs())  # int8 has no 128
    low, high = (torch.empty(arguments["out"].shape) for _ in range(2))
    for out, factor in ((low, 1 - TIE), (high, 1 + TIE)):
        moved = {"qkv": qkv, "out": out, "softmax_levels": levels * factor}
        KERNELS["attention"](**without_tiles(arguments) | moved).reference()
    return low - high


def assert_same(run, operation, outputs, arguments, exact=False):
    """`exact`: bit by bit if kernels round as references do, and always for FasterTransformer's."""
    fastertransformers = getattr(arguments.get("epilogue"), "product_levels", None) is not None
    exact = exact and (is_exact(run) or operation != "gemm" or fastertransformers)
    widened = [] if exact else [name for name in outputs if arguments[name].dtype in BYTES]
    for got, expected in both(run, operation, outputs, arguments, widened):
        if exact:
            assert torch.equal(got, expected)
        else:
            assert_near(run, got, expected)


SQUARES = {torch.int8: 74**2, FLOAT8: 100**2}  # mean squares of operands


def linear(draw, dtype, m, n, k):
    """The arguments of every epilogue; sums of k products are about one."""
    scale = draw.positive(n) / (k**0.5 * SQUARES.get(dtype, 1))
    return {"a": draw.operand(dtype, m, k), "w": draw.operand(dtype, n, k), "scale": scale, "bias": draw.real(n)}


operands = st.sampled_from([torch.int8, FLOAT8, torch.float16])  # bfloat16: the interpreter multiplies its bits


def windowed(draw, dtype, m, heads, batch=1, d=32):
    window = Windows(*m)
    rows = batch * m[0] ** 2
    return {
        "qkv": draw.operand(dtype, rows, 3 * heads * d),
        "windows": window,
        "heads": heads,
        "position_bias": draw.real(heads, window.tokens, bias_row(window.tokens)),
        "logits_scale": draw.positive(heads) / d**0.5 / SQUARES.get(dtype, 1),
    }
