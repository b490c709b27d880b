"""The instructions that kernels take, in the counts that come with the package: none may grow unseen.

A change of kernels makes these counts old: `python benchmarks/cuda_static.py` counts them again.
"""

import pytest
from instructions import instructions, probes

from swin_quant.backends.cuda.counts import count, shipped_counts

AGAIN = "kernels changed since they were counted: run benchmarks/cuda_static.py"
MOST = {  # issue 44 asks for 16, 2.5 and 12
    "GELU, an element": 31.0,
    "rounding to int8, an element": 4.5,
    "attention, a logit": 22.6,
    "attention with a shift, a logit": 46.1,
}


def test_no_part_of_a_kernel_takes_more_instructions_than_it_did():
    found = instructions(shipped_counts())
    assert found, AGAIN
    assert {name: round(number, 2) for name, number in found.items() if number > MOST[name]} == {}
    assert all(number > 0 for number in found.values())


def test_the_counts_that_come_with_the_package_are_those_of_its_kernels():
    pytest.importorskip("triton")
    launch = probes()["plain"]
    known, again = shipped_counts().of(launch, 90), count(launch, 90)
    assert known, AGAIN
    assert again.counts.issue == pytest.approx(known.counts.issue, rel=0.05)  # another compiler may differ a little
    assert again.warps == known.warps
