"""What a layer saves is taken for true only where all rounds of timing say so."""

import pytest

from swin_quant.score.interleave import Timing
from swin_quant.tasks.policy_timing import beyond_chance


def timing(*rounds):
    return Timing("x", 1, rounds=[[ms] for ms in rounds])


@pytest.mark.parametrize(
    "rounds, ratio",
    [((1.1, 1.3, 1.2), 1.1), ((0.9, 0.8, 0.95), 0.8), ((1.1, 0.9, 1.3), 1.0), ((1.0, 1.0, 1.0), 1.0)],
)
def test_rounds_that_do_not_agree_tell_nothing(rounds, ratio):
    assert beyond_chance(timing(*rounds), timing(1.0, 1.0, 1.0)) == ratio


def test_best_rounds_that_say_otherwise_than_each_pair_tell_nothing():
    assert beyond_chance(timing(1.1, 2.2, 3.3), timing(1.0, 2.0, 3.0)) == pytest.approx(1.1)
    assert beyond_chance(timing(4.1, 2.2, 3.3), timing(4.0, 2.0, 3.0)) == pytest.approx(1.1)
    assert beyond_chance(timing(0.9, 2.2, 3.3), timing(0.8, 2.0, 0.7)) > 1
    assert beyond_chance(timing(0.9, 2.2, 3.3), timing(1.8, 0.5, 3.0)) == 1
