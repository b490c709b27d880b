"""A rank may have no picture: an empty batch passes through, and its gradients are zero."""

import pytest
import torch

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import enabled_nodes, quantize


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("policy", ["float", "ft-mode1", "qdq"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_no_picture_gives_no_logits_and_zero_gradients(tiny_model, use_policy, kind, policy, checkpointing):
    stages = {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
    model = tiny_model(kind, DEPTHS=[2, 1], NUM_HEADS=[1, 2], DROP_PATH_RATE=0.2, **stages)
    calibrate(model, [torch.randn(2, 3, 32, 32), torch.empty(0, 3, 32, 32)], Method("max"))
    use_policy(model, policy)
    for node in enabled_nodes(model).values():
        node.learn_range()
    quantize(model)
    for stage in model.layers:
        stage.checkpointing = checkpointing
    for mode in (model.train(), model.eval()):
        logits = mode(torch.empty(0, 3, 32, 32))
        assert logits.shape == (0, 10) and logits.dtype == torch.float32
        model.zero_grad()
        logits.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
