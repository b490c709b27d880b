"""Counts of machine code and estimates of launches, by hand."""

import pytest
from estimates import REACHED, KernelCounts, clock_ghz, count_code, estimate_us, find_bounds
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.cuda.gpu import gpus, load_machine
from tests.backends.cuda.conftest import launches_of

LAUNCHES = launches_of("swin_tiny_patch4_window7_224")
QKV = next(one for one in LAUNCHES if one.name == "layers.0.blocks.0.attn.qkv")  # 784 x 3 tiles of 128 x 128
WORDS = "issue", "alu", "fma", "special", "memory", "tensor"
H200 = load_machine("h200")
LOOP = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   NOP ;
.L_x_0:
        /*0030*/                   FFMA R8, R4, R4, R8 ;
        /*0040*/                   MUFU.EX2 R9, R8 ;
        /*0050*/                   IMMA.16832.S8.S8 R12, R16.ROW, R20.COL, R12 ;
        /*0060*/                   ISETP.GE.AND P0, PT, R9, 0x3, PT ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/               @P1 EXIT ;
        /*0090*/                   STG.E desc[UR4][R2.64], R8 ;
        /*00a0*/                   EXIT ;
.L_x_1:
        /*00b0*/                   BRA `(.L_x_1);
        /*00c0*/                   NOP ;
"""


def kernel(**cycles):
    return KernelCounts(dict.fromkeys(WORDS, 0.0) | cycles, 8, 64, 1024)


@given(st.integers(1, 50))
def test_loops_count_as_often_as_they_run(trips):
    found = count_code(LOOP, (trips,), 80)
    assert found["issue"] == 2 + 5 * trips + 3
    assert (found["alu"], found["fma"], found["special"]) == (2 * trips, 2 * trips, 8 * trips)
    assert found["memory"] == 4 * 4 + 4  # 16 bytes a thread, then 4
    assert found["tensor"] == 8 * trips  # 2 * 16 * 8 * 32 operations, 1024 a clock of a scheduler


@pytest.mark.parametrize("product", ["IGMMA.64x128x32.S8.S8", "HGMMA.64x128x16.F32"])
def test_products_of_four_warps_are_a_quarter_each(product):
    found = count_code(f"/*0000*/ {product} R24, gdesc[UR4], R24, gsb0 ;", (), 90)
    assert found["tensor"] == 2 * 64 * 128 * 32 / 4 / 2048


def test_the_clock_is_that_of_the_data_sheet():
    """Boost clocks: NVIDIA's white papers; H100's follows from its peak."""
    known = {"a100": 1.41, "a10": 1.695, "l40s": 2.52, "rtx4090": 2.52, "rtx5090": 2.407, "h100": 1.83, "h200": 1.83}
    assert {name: clock_ghz(load_machine(name)) for name in known} == pytest.approx(known, rel=1e-3)
    assert all(1 < clock_ghz(load_machine(name)) < 2.6 for name in gpus())


def test_instructions_take_the_schedulers_of_the_busiest_multiprocessor():
    counts = kernel(issue=1000, alu=1500)
    bounds, clock = find_bounds(QKV, counts, H200), clock_ghz(H200) * 1e3
    each = -(-2352 // 132)  # programs, of 8 warps for 4 schedulers
    assert bounds["issue"] == pytest.approx(each * 2 * 1000 / clock)
    assert bounds["alu"] == pytest.approx(1.5 * bounds["issue"])
    assert bounds["chain"] == pytest.approx(-(-each // 4) * 4400 / clock)
    assert bounds["memory"] == pytest.approx((100352 * 96 + 288 * 96 + 2 * 288 * 4 + 100352 * 288) / 4.8e6)
    assert bounds["cache"] == pytest.approx(each * (128 + 128) * 96 / 64 / clock)
    assert estimate_us(QKV, counts, H200) == pytest.approx(1.6 + bounds["alu"] / 0.85)


@given(st.lists(st.floats(0, 1e5), min_size=6, max_size=6), st.sampled_from(["issue", "tensor", "memory", "alu"]))
def test_more_of_anything_is_never_faster(numbers, word):
    some = dict(zip(WORDS, numbers, strict=True))
    less, more = (estimate_us(QKV, kernel(**counts), H200) for counts in (some, {**some, word: 2 * some[word]}))
    assert 1.6 < less <= more
    assert less >= max(time / REACHED[name] for name, time in find_bounds(QKV, kernel(**some), H200).items())
