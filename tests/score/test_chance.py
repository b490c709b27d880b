"""When a model only guesses: against the binomial distribution by fractions."""

from fractions import Fraction
from math import comb

import pytest

from swin_quant.score.metrics import _at_most, is_guessing


def exact(right, pictures, chance):
    chance = Fraction(chance)
    return sum(comb(pictures, n) * chance**n * (1 - chance) ** (pictures - n) for n in range(right + 1))


BINOMIAL = [(0, 5, 2), (3, 12, 10), (40, 400, 10), (-1, 7, 3), (7, 7, 3)]


@pytest.mark.parametrize(("right", "pictures", "classes"), BINOMIAL)
def test_the_binomial_distribution(right, pictures, classes):
    assert _at_most(right, pictures, 1 / classes) == pytest.approx(float(exact(right, pictures, 1 / classes)), rel=1e-9)


@pytest.mark.parametrize(
    ("right", "pictures", "classes", "guesses"),
    [
        (19, 400, 10, True),  # 4.75 %
        (35, 400, 10, True),
        (75, 400, 10, False),  # 18.75 % is poor, and no guessing
        (276, 400, 10, False),
        (50, 50_000, 1000, True),
        (500, 50_000, 1000, False),
        (0, 12, 10, True),
        *((right, 5, 2, False) for right in range(6)),  # too few to tell
        (50, 100, 2, True),
        (70, 100, 2, False),
    ],
)
def test_who_guesses(right, pictures, classes, guesses):
    assert is_guessing(right, pictures, classes) is guesses
