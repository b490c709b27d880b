"""What a CPU says of its instructions."""

import pytest

from swin_quant.base import cpu


@pytest.mark.parametrize(
    "text, expected",
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_vnni avx2 amx_int8 amx_int8x\n", ["avx2", "avx512_vnni", "amx_int8"]),
        ("Features\t: fp asimd i8mm asimddp\n", ["asimddp", "i8mm"]),
        ("nothing known", []),
    ],
)
def test_the_features_of_a_cpu_are_read_by_whole_words(text, expected):
    assert cpu.features(cpu.INT8_FEATURES, text) == expected
