import pytest
import torch
import torch.nn.functional as F

from swin_quant.base.errors import UsageError
from swin_quant.models.layers import DropPath
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import apply_policy, quantize
from swin_quant.train.amax import RangeKeeper
from swin_quant.train.optim import freeze_stages, make_optimizer
from swin_quant.train.recipe import Optimizer, Ranges


def test_frozen_stages_keep_weights_and_ranges_to_the_bit(tiny_model):
    model, images = tiny_model("swin", DROP_PATH_RATE=0.2), torch.randn(4, 3, 32, 32)
    calibrate(model, [images], Method("max"))
    apply_policy(model, load_policy("qdq"))
    frozen = freeze_stages(model, 1)
    quantize(model)
    keeper = RangeKeeper(model, Ranges(mode="learned"), 1, lambda: [images], frozen)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = make_optimizer(model, Optimizer(lr=0.1), 4, fused=False)
    model.train()
    F.cross_entropy(model(images), torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()
    keeper.after_step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert not any(key.startswith(("patch_embed", "layers.0")) for key in moved)
    assert "head.weight" in moved and "layers.1.blocks.0.mlp.fc1.weight" in moved
    assert "layers.1.blocks.0.mlp.fc1._input_quantizer._amax" in moved
    assert all(m.rate == 0 for name, m in model.named_modules() if isinstance(m, DropPath) and "layers.0" in name)


def test_no_stage_and_too_many(tiny_model):
    model = tiny_model("swin")
    assert freeze_stages(model, 0) == set() and all(p.requires_grad for p in model.parameters())
    with pytest.raises(UsageError, match="freeze_stages 3: the model has 2 stages"):
        freeze_stages(model, 3)
