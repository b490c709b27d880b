"""One training step taken apart: batch norms train, dropout does not."""

import torch
from torch import nn

from swin_quant.score.alignment import step_trace


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
