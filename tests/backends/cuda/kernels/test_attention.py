"""Window attention in every type: in one tile, in tiles of keys, and with several windows a program."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import (
    BYTES,
    FLOAT8,
    Draw,
    assert_near,
    attention_moves,
    both,
    few,
    interprets_bounds,
    is_exact,
    maps,
    need_float8,
    poisoned,
    seeds,
    windowed,
)

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.spec import LARGEST_HEAD_DIM

SHIFTED = [(16, 8, 4), (24, 12, 6), (32, 16, 8), pytest.param((48, 24, 12), marks=pytest.mark.slow)]


def assert_attention(run, arguments, tiled=False):
    ((got, exact),) = both(run, "attention", ["out"], arguments, ["out"] if arguments["out"].dtype in BYTES else ())
    assert_near(run, got, exact, moves=attention_moves(arguments, tiled))


HOW = {  # the type of q, k and v, and the levels of probabilities
    "int8": (torch.int8, {"softmax_levels": 127.0, "context_scale": 1 / 127}),
    "int8 and half": (torch.int8, {"context_scale": 1.0}),
    "float8": (FLOAT8, {"context_scale": 1.0}),
    "float8 in all": (FLOAT8, {"softmax_levels": 448.0, "context_scale": 1 / 448}),
    "half": (torch.float16, {}),
}


def of_windows(run, seed, how, m, heads, batch, d=32):
    """The arguments of attention, `how` as in HOW."""
    dtype, levels = HOW[how]
    if dtype == FLOAT8:
        need_float8(run)
    return windowed(Draw(seed), dtype, m, heads, batch, d) | {
        "out": poisoned(dtype, batch * m[0] ** 2, heads * d),
        **levels,
    }


@pytest.mark.parametrize("d", [32, 64, LARGEST_HEAD_DIM])
@pytest.mark.parametrize("how", HOW)
@few
@given(seed=seeds, m=maps, batch=st.integers(1, 3), heads=st.integers(1, 2))
def test_attention(run, seed, m, batch, heads, how, d):
    assert_attention(run, of_windows(run, seed, how, m, heads, batch, d), tiled=how == "float8 in all")


@pytest.mark.parametrize("m", SHIFTED)
def test_attention_of_wide_shifted_maps(run, m):
    """Several windows, each with its own mask, against the reference's, which is the model's."""
    arguments = windowed(Draw(m[0]), torch.int8, m, 1) | {"out": poisoned(torch.int8, m[0] ** 2, 32)}
    assert_attention(run, arguments | {"softmax_levels": 127.0, "context_scale": 1 / 127})


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu"], indirect=True)
@few
@given(seed=seeds, m=maps)
def test_attention_of_bfloat16(run, seed, m):
    out = poisoned(torch.bfloat16, m[0] ** 2, 64)
    assert_attention(run, windowed(Draw(seed), torch.bfloat16, m, 2) | {"out": out})


@pytest.mark.parametrize("how", ["int8", "int8 and half", "float8", "half"])
@few
@given(
    seed=seeds,
    m=st.sampled_from([(4, 2, 0), (6, 3, 1), (14, 7, 3)]),
    batch=st.integers(1, 3),
    windows=st.sampled_from([2, 4, 8, 32]),
    side=st.sampled_from([32, 64]),
)
def test_attention_of_several_windows_a_program(run, seed, m, batch, windows, side, how):
    """Equal to the bit to one window a program, also if their number does not divide, and if a window is two tiles."""
    if is_exact(run) and not interprets_bounds():
        pytest.skip("Triton 3.6 does not interpret a loop whose bounds are values of NumPy 2.4")
    arguments = of_windows(run, seed, how, m, 2, batch) | {"tiles": Tiles(side, side, windows=windows)}
    out = arguments["out"].clone()
    assert_attention(run, arguments, tiled=m[1] ** 2 > side)
    if is_exact(run):
        one, several = (
            run("attention", ["out"], arguments | {"tiles": Tiles(side, side, windows=n), "out": out.clone()})["out"]
            for n in (1, windows)
        )
        assert torch.equal(one.float(), several.float())


@pytest.mark.parametrize(("window", "keys"), [(8, 64), (12, 32), (16, 64), (24, 64)])
@pytest.mark.parametrize("how", ["int8", "int8, no shift", "int8 and half", "float8", "half"])
def test_attention_in_tiles_of_keys(run, window, keys, how):
    draw, dtype = Draw(window), {"half": torch.float16, "float8": FLOAT8}.get(how, torch.int8)
    arguments = windowed(draw, dtype, (window, window, 0 if how.endswith("no shift") else window // 2), 1)
    arguments |= {"tiles": Tiles(128, keys), "out": poisoned(dtype, window**2, 32)}
    if how.startswith("int8") and not how.endswith("half"):
        arguments |= {"softmax_levels": 127.0 * 8, "context_scale": 1 / 127}
    assert_attention(run, arguments, tiled=how in ("int8 and half", "float8"))
