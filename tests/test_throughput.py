"""Images per second: so many forwards, of so many images, and no longer than allowed."""

import time

import pytest
import torch

from swin_quant.throughput import throughput


def counting(seconds=0.0):
    calls = []

    def engine(images):
        assert torch.is_inference_mode_enabled()
        calls.append(len(images))
        time.sleep(seconds)
        return images

    return engine, calls


def test_it_is_fastertransformers_50_and_30_forwards():
    engine, calls = counting()
    throughput(engine, torch.zeros(2, 3, 4, 4))
    assert calls == [2] * 80


def test_the_rate_counts_images():
    engine, _ = counting(0.02)
    assert 200 < throughput(engine, torch.zeros(8, 3, 2, 2), warm_up=1, runs=5) <= 400


def test_a_slow_engine_is_cut_short_and_measured_nevertheless():
    engine, calls = counting(0.05)
    start = time.monotonic()
    assert throughput(engine, torch.zeros(1, 3, 2, 2), seconds=0.2) == pytest.approx(20, rel=0.4)
    assert time.monotonic() - start < 2 and 2 <= len(calls) < 20
