"""The bootstrap's closed form equals drawing, and its prediction for more pictures holds."""

import numpy as np
import pytest

from swin_quant.quant.ranges import pictures_for, relative_uncertainty, sample_uncertainty


def drawn(peaks, covered, size, times=20_000):
    """Standard error over mean of the covered share of the peaks, by drawing."""
    rng = np.random.default_rng(0)
    rank = max(1, int(np.ceil(size * covered / len(peaks))))
    found = np.sort(rng.choice(peaks, (times, size)), axis=1)[:, rank - 1]
    return found.std() / found.mean()


@pytest.mark.parametrize("size", [None, 6, 24])
@pytest.mark.parametrize("covered", [1, 5, 12])
def test_it_is_the_bootstrap(covered, size):
    peaks = np.sort(np.random.default_rng(1).lognormal(0, 0.5, 12))
    amax = float(peaks[covered - 1])
    assert relative_uncertainty(list(peaks), amax, size) == pytest.approx(drawn(peaks, covered, size or 12), rel=0.03)


def test_ranges_that_do_not_hang_on_a_picture_spread_nothing():
    assert relative_uncertainty([2.0, 3.0, 4.0], 1.0) == 0.0  # below every picture's largest value
    assert relative_uncertainty([3.0] * 5, 3.0) == 0.0
    assert relative_uncertainty([3.0], 3.0) == 0.0


def test_many_pictures_do_not_take_long_and_spread_less():
    rng = np.random.default_rng(2)
    few, many = (sorted(rng.uniform(1, 2, count)) for count in (16, 1024))
    assert relative_uncertainty(many, many[-1]) < relative_uncertainty(few, few[-1]) / 10


def test_how_many_pictures_would_do():
    """Uniform largest values: the error of their maximum falls in proportion to the number of pictures."""
    rng = np.random.default_rng(3)
    peaks = {f"node {i}": sorted(rng.uniform(0, 1, 16)) for i in range(50)}
    uncertainty, power = sample_uncertainty(peaks, {name: each[-1] for name, each in peaks.items()})
    assert 0.05 < uncertainty < 0.2 and power > 0.5
    wanted = pictures_for(uncertainty, power, 16, uncertainty / 4)
    assert 64 <= wanted <= 256
    more = {f"node {i}": sorted(rng.uniform(0, 1, wanted)) for i in range(50)}
    assert sample_uncertainty(more, {name: each[-1] for name, each in more.items()})[0] < uncertainty / 2
    assert pictures_for(0.01, 1.0, 64, 0.1) == 64
    assert sample_uncertainty({"dead": [0.0, 0.0]}, {"dead": 1.0})[0] == 0.0
