"""Models over several ranks; what takes several processes to see is tested with the commands."""

import pytest
import torch

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.train.parallel import without_values


@pytest.mark.slow
def test_a_copy_without_values_takes_no_memory_and_becomes_the_model_again(tiny_model, use_policy):
    model = use_policy(tiny_model("swin", DEPTHS=[2, 1], NUM_HEADS=[1, 2]), "qdq")
    x = torch.randn(2, 3, 32, 32)
    calibrate(model, [x], Method("max"))
    quantize(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    empty = without_values(model)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert [node.state for node in named_nodes(empty).values()] == [node.state for node in named_nodes(model).values()]
    empty.load_state_dict(weights, assign=True)
    with torch.no_grad():
        assert torch.equal(empty(x), model(x))
