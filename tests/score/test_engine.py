"""A call is timed with its work; images per second come from a bounded number of forward passes."""

import time

import pytest
import torch

from swin_quant.score.engine import milliseconds, throughput


def test_on_a_cpu_a_call_takes_as_long_as_it_takes_and_its_error_is_raised():
    assert milliseconds(lambda images: time.sleep(0.02), torch.zeros(1, 3, 4, 4)) >= 20
    with pytest.raises(ZeroDivisionError):
        milliseconds(lambda images: 1 / 0, torch.zeros(1, 3, 4, 4))


def test_it_is_fastertransformers_50_and_30_forwards_within_a_time(monkeypatch):
    """On a clock that stands still but for forward passes."""
    now, calls = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def run(images):
        nonlocal now
        assert torch.is_inference_mode_enabled()
        calls.append(len(images))
        now += 0.02
        return images

    throughput(run, torch.zeros(2, 3, 4, 4))
    assert calls == [2] * 80
    assert throughput(run, torch.zeros(8, 3, 2, 2), warm_up=1, runs=5) == pytest.approx(400)
    calls.clear()
    throughput(run, torch.zeros(1, 3, 2, 2), seconds=0.2)
    assert len(calls) <= 12
