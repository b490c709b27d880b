"""The time of a call is that of its work."""

import time

import pytest
import torch

from swin_quant.score.latency import milliseconds


def test_on_a_cpu_a_call_takes_as_long_as_it_takes():
    taken = milliseconds(lambda images: time.sleep(0.02), torch.zeros(1, 3, 4, 4))
    assert taken >= 20


def test_an_engine_that_fails_says_so():
    with pytest.raises(ZeroDivisionError):
        milliseconds(lambda images: 1 / 0, torch.zeros(1, 3, 4, 4))
