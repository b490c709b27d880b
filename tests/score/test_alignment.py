"""Figures of two traces against NumPy, the first difference, and the trace of one training step."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from swin_quant.report.engines import Alignment
from swin_quant.score.alignment import Aligned, Tally, step_trace


def tally(*batches):
    made = Tally()
    for a, b in batches:
        made.add(a, b)
    return made


def test_the_figures_over_batches_against_numpy():
    rng = np.random.default_rng(0)
    a = rng.normal(0, 2, (5, 3, 4)).astype(np.float32)
    b = (a + rng.normal(0, 0.1, a.shape)).astype(np.float32)
    parts = [
        ({"forward/x": torch.from_numpy(a[s])}, {"forward/x": torch.from_numpy(b[s])}) for s in (slice(3), slice(3, 5))
    ]
    (row,) = tally(*parts).rows()
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    assert (row.group, row.name, row.problem) == ("forward", "x", None)
    assert row.max == pytest.approx(np.abs(x - y).max()) and row.mean == pytest.approx(np.abs(x - y).mean())
    assert row.cosine == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-3)
    assert row.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert row.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))


def test_equal_zero_and_broken_tensors():
    one, none = torch.ones(2, 3), torch.zeros(2, 3)
    a = {"forward/equal": one, "forward/lost": none, "forward/nan": one, "forward/shape": one, "forward/a": one}
    b = {"forward/equal": one, "forward/lost": one, "forward/nan": one / 0, "forward/shape": one[:, :2]}
    b["forward/b"] = one
    made = tally((a, b))
    equal, lost, nan, shape = made.rows()
    assert equal.sqnr_db == math.inf and equal.cosine == pytest.approx(1) and not equal.below(1000)
    assert lost.sqnr_db == -math.inf and lost.below(-1000)
    assert nan.problem == "NaN or infinity in B" and nan.below(0)
    assert shape.problem == "[2, 3] against [2, 2]"
    assert made.only == ({"forward/a"}, {"forward/b"})


def test_tokens_in_another_shape_are_the_same_tokens():
    x = torch.randn(2, 16, 8)
    (row,) = tally(({"forward/x": x}, {"forward/x": x.reshape(8, 4, 8)})).rows()
    assert row.sqnr_db == math.inf


def test_groups_come_in_the_order_of_a_step():
    names = "update/w gradients/w loss/loss output/logits forward/b forward/a weights/w input/images"
    trace = {name: torch.ones(1) for name in names.split()}
    rows = tally((trace, trace)).rows()
    groups = ["input", "weights", "forward", "forward", "output", "loss", "gradients", "update"]
    assert [row.group for row in rows] == groups and [row.name for row in rows[2:4]] == ["b", "a"]


def at(name, sqnr, problem=None):
    return Aligned("forward", name, 0.1, 0.1, 0.9, sqnr, problem)


def test_the_first_below_the_limit_is_named_and_the_largest_fall():
    rows = [at("a", math.inf), at("b", 80.0), at("c", 75.0), at("d", 90.0), at("e", 40.0), at("f", 38.0)]
    found = Alignment("A", "B", rows, 60.0, 1)
    assert found.first == rows[4] and found.drop == (rows[2], rows[4])
    assert Alignment("A", "B", rows, 20.0, 1).first is None
    assert Alignment("A", "B", [at("x", math.nan, "another shape"), *rows], 20.0, 1).first.name == "x"
    assert Alignment("A", "B", [at("a", 10.0), at("b", 20.0)], 20.0, 1).drop is None


def test_batch_norm_takes_its_step_and_dropout_draws_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.9), nn.Flatten(), nn.Linear(4 * 36, 5))
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    trace = step_trace(model, images, labels, 0.5)
    seen = torch.nn.functional.conv2d(images, trace["weights/0.weight"], trace["weights/0.bias"])
    mean, var = seen.mean((0, 2, 3)), seen.var((0, 2, 3))
    assert torch.allclose(trace["forward/0"], seen, atol=1e-6)
    assert torch.equal(trace["weights/1.running_mean"], torch.zeros(4))
    assert torch.allclose(trace["update/1.running_mean"], 0.1 * mean, atol=1e-6)
    assert torch.allclose(trace["update/1.running_var"], 0.9 + 0.1 * var, atol=1e-6)
    normed = (seen - mean[:, None, None]) / (seen.var((0, 2, 3), correction=0)[:, None, None] + 1e-5).sqrt()
    logits = torch.nn.functional.linear(normed.flatten(1), trace["weights/4.weight"], trace["weights/4.bias"])
    assert torch.allclose(trace["output/logits"], logits, atol=1e-4)
    assert torch.allclose(trace["loss/loss"], -logits.log_softmax(1)[range(6), labels].mean(), atol=1e-5)
    assert not model.training and torch.equal(trace["update/4.bias"], model[4].bias)
    step = trace["weights/4.bias"] - 0.5 * trace["gradients/4.bias"]
    assert torch.allclose(trace["update/4.bias"], step) and not torch.equal(step, trace["weights/4.bias"])
