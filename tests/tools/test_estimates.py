"""Estimates of launches from counts: by hand, and what they are made of."""

from dataclasses import replace

import pytest
from estimates import REACHED, KernelCounts, clock_ghz, estimate_of
from hypothesis import given
from hypothesis import strategies as st
from sass import Counts

from swin_quant.backends.cuda.machines import gpus, load_machine
from tests.backends.cuda.conftest import launches_of

LAUNCHES = launches_of("swin_tiny_patch4_window7_224")
QKV = next(one for one in LAUNCHES if one.name == "layers.0.blocks.0.attn.qkv")  # 784 x 3 tiles of 128 x 128
NOTHING = Counts(0, 0, 0, 0, 0, 0, 0)
H200 = load_machine("h200")


def kernel(**numbers):
    return KernelCounts(replace(NOTHING, **numbers), 8, 64, 1024)


def test_the_clock_is_that_of_the_data_sheet():
    """Boost clocks: NVIDIA's white papers; H100's follows from its peak."""
    known = {"a100": 1.41, "a10": 1.695, "l40s": 2.52, "rtx4090": 2.52, "rtx5090": 2.407, "h100": 1.83, "h200": 1.83}
    assert {name: clock_ghz(load_machine(name)) for name in known} == pytest.approx(known, rel=1e-3)
    assert all(1 < clock_ghz(load_machine(name)) < 2.6 for name in gpus())


def test_instructions_take_the_schedulers_of_the_busiest_multiprocessor():
    found = estimate_of(QKV, kernel(issue=1000, alu=1500), H200)
    clock = clock_ghz(H200) * 1e3
    each = -(-2352 // 132)  # programs, of 8 warps for 4 schedulers
    assert found.bounds["issue"] == pytest.approx(each * 2 * 1000 / clock)
    assert found.bounds["alu"] == pytest.approx(1.5 * found.bounds["issue"])
    assert found.bounds["chain"] == pytest.approx(-(-each // 4) * 4400 / clock)
    assert found.bounds["memory"] == pytest.approx((100352 * 96 + 288 * 96 + 2 * 288 * 4 + 100352 * 288) / 4.8e6)
    assert found.bounds["cache"] == pytest.approx(each * (128 + 128) * 96 / 64 / clock)
    assert found.bound == "alu" and found.us == pytest.approx(1.6 + found.bounds["alu"] / 0.85)


@given(st.lists(st.floats(0, 1e5), min_size=7, max_size=7), st.sampled_from(["issue", "tensor", "memory", "alu"]))
def test_more_of_anything_is_never_faster(numbers, word):
    some = dict(zip(("issue", "alu", "fma", "special", "memory", "tensor", "operations"), numbers, strict=True))
    less, more = (estimate_of(QKV, kernel(**counts), H200) for counts in (some, {**some, word: 2 * some[word]}))
    assert 1.6 < less.us <= more.us
    assert less.us >= max(time / REACHED[name] for name, time in less.bounds.items())
