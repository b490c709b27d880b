"""Estimates of launches from counts: by hand, their range, and what they are made of."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.cuda.counts import CountsFile, KernelCounts, key_of
from swin_quant.backends.cuda.crosscompile import kernel_of
from swin_quant.backends.cuda.estimates import LAUNCHING, REACHED, clock_ghz, counts_of, estimate_of, resident_programs
from swin_quant.backends.cuda.floors import floor_of
from swin_quant.backends.cuda.sass import Counts
from swin_quant.operators.roofline import gpus, load_machine
from tests.backends.cuda.conftest import launches_of

LAUNCHES = launches_of("swin_tiny_patch4_window7_224")
QKV = next(one for one in LAUNCHES if one.name == "layers.0.blocks.0.attn.qkv")  # 784 x 3 tiles of 128 x 128
NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, 0)
H200 = load_machine("h200")


def kernel(**numbers):
    return KernelCounts(replace(NOTHING, **numbers), 8, 64, 1024)


def test_the_clock_is_that_of_the_data_sheet():
    """Boost clocks: NVIDIA's white papers; H100's follows from its peak."""
    known = {"a100": 1.41, "a10": 1.695, "l40s": 2.52, "rtx4090": 2.52, "rtx5090": 2.407, "h100": 1.83, "h200": 1.83}
    assert {name: clock_ghz(load_machine(name)) for name in known} == pytest.approx(known, rel=1e-3)
    assert all(1 < clock_ghz(load_machine(name)) < 2.6 for name in gpus())


def test_programs_share_registers_memory_and_threads():
    assert resident_programs(90, 8, 255, 0) == 1  # 256 x 32 x 8 registers
    assert resident_programs(90, 4, 64, 0) == 8
    assert resident_programs(90, 4, 32, 98304) == 2  # of 228 KB, 1 KB each beside
    assert resident_programs(90, 1, 16, 0) == 32
    assert resident_programs(80, 4, 32, 164 << 10) == 0


def test_instructions_take_the_schedulers_of_the_busiest_multiprocessor():
    found = estimate_of(QKV, kernel(issue=1000, alu=1500, serial=7000), H200)
    clock = clock_ghz(H200) * 1e3
    each = -(-2352 // 132)  # programs, of 8 warps for 4 schedulers
    assert found.programs == 2352 and found.resident == 4 and found.waves == -(-each // 4)
    assert found.bounds["issue"] == pytest.approx(each * 2 * 1000 / clock)
    assert found.bounds["alu"] == pytest.approx(1.5 * found.bounds["issue"])
    assert found.bounds["chain"] == pytest.approx(found.waves * 7000 / clock)
    assert found.bounds["memory"] == floor_of([QKV], H200).memory_us
    assert found.bounds["cache"] == pytest.approx(each * (128 + 128) * 96 / 64 / clock)
    assert found.bound == "alu" and found.us == pytest.approx(1.6 + found.bounds["alu"] / 0.85)


@given(st.lists(st.floats(0, 1e5), min_size=8, max_size=8), st.sampled_from(["issue", "tensor", "memory", "serial"]))
def test_more_of_anything_is_never_faster(numbers, word):
    some = dict(
        zip(("issue", "alu", "fma", "special", "memory", "tensor", "operations", "serial"), numbers, strict=True)
    )
    less, more = (estimate_of(QKV, kernel(**counts), H200) for counts in (some, {**some, word: 2 * some[word]}))
    assert less.us <= more.us and less.low <= less.us <= less.high
    assert less.low >= max(time / REACHED[name].best for name, time in less.bounds.items())
    assert LAUNCHING.best >= LAUNCHING.likely >= LAUNCHING.worst


def test_counts_are_of_one_capability_and_of_all_launches():
    l40s, some = load_machine("l40s"), LAUNCHES[:4]

    def file(capability, launches):
        return {key_of(kernel_of(one).prepare(), capability): kernel(issue=capability) for one in launches}

    def issues(known):
        found = counts_of(some, l40s, CountsFile("", known))
        return found and {one.counts.issue for one in found.values()}

    assert issues(file(89, some) | file(90, some)) == {89}
    assert issues(file(89, some[1:]) | file(90, some)) == {90}  # counts of 9.0 stand in
    assert issues(file(89, some[1:]) | file(90, some[:1])) is None
