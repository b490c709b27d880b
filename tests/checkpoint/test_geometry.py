"""Files of other models are refused in one line: some of their keys, and the ways in."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint.identify import config_for

WAYS = "a Swin inside it gives its maps by output_kind features; else give cfg timm:NAME, or its module to `sq.wrap`"


@pytest.mark.parametrize(
    "keys",
    [
        ["conv_first.weight", "layers.0.residual_group.blocks.0.attn.qkv.weight"],
        ["backbone.stages.0.blocks.0.attn.w_msa.qkv.weight", "head.fc.weight"],
        ["backbone.anything.weight", "module.bbox_head.fc.weight"],
        ["base.lora_A.weight", "base.lora_B.weight"],
    ],
)
def test_other_models_are_shown_by_their_keys(keys, tmp_path):
    torch.save({key: torch.zeros(1) for key in keys}, tmp_path / "x.pth")
    with pytest.raises(SwinQuantError) as refusal:
        config_for(tmp_path / "x.pth")
    assert str(refusal.value).endswith(f"is no Swin classifier (its keys are {', '.join(keys)}): {WAYS}")
