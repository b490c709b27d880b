"""Publishers' names become ours, checked with the models of timm and transformers and timm's own converter."""

import importlib

import pytest
import torch

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import open_checkpoint
from swin_quant.checkpoint.names import to_microsoft
from tests.checkpoint.published import of_transformers
from tests.helpers.refusals import refused

SIZES = {
    "swin_tiny_patch4_window7_224": {"img_size": 56, "window_size": 7},
    "swinv2_tiny_window8_256": {"img_size": 64, "window_size": 8},
}


@pytest.fixture(scope="module", params=SIZES)
def timm_model(request):
    """timm's Swin-T, narrow to be made quickly; names do not depend on the width."""
    torch.manual_seed(0)
    model = import_timm().create_model(
        request.param, embed_dim=16, num_heads=(1, 2, 4, 8), num_classes=7, **SIZES[request.param]
    )
    return model.eval()


def test_timm_agrees_that_the_result_is_microsofts(timm_model):
    """timm recognises Microsoft's files and renames them in the other direction: it must arrive at our start."""
    module = importlib.import_module(type(timm_model).__module__)
    original = timm_model.state_dict()
    state, convention = to_microsoft(original)
    assert convention == "timm"
    assert {"head.weight", "layers.0.downsample.norm.weight", "layers.2.downsample.reduction.weight"} <= set(state)
    assert not any(key.startswith(("layers.3.downsample", "head.fc")) for key in state)
    back = module.checkpoint_filter_fn(dict(state), timm_model)
    assert back.keys() == original.keys()
    assert all(back[key] is original[key] for key in back)
    old = {key.replace("head.", "head.fc."): value for key, value in state.items()}  # timm's layout before
    again, convention = to_microsoft(old)
    assert convention == "timm" and list(again) == list(state) and all(again[key] is state[key] for key in state)


def test_simmim_wrappers_and_unknown_keys():
    one, two = torch.ones(1), torch.zeros(1)
    key = "layers.0.blocks.0.attn.rpe_mlp.0.weight"
    assert to_microsoft({key: one, "other": two}) == (
        {"layers.0.blocks.0.attn.cpb_mlp.0.weight": one, "other": two},
        "SimMIM",
    )
    assert to_microsoft({"module.norm.weight": one, f"module.{key}": two}) == (
        {"norm.weight": one, "layers.0.blocks.0.attn.cpb_mlp.0.weight": two},
        "DistributedDataParallel + SimMIM",
    )
    assert to_microsoft({"_orig_mod.norm.weight": one})[0] == {"norm.weight": one}
    assert to_microsoft({"model.norm.weight": one, "model.head.bias": two}) == (
        {"norm.weight": one, "head.bias": two},
        "Lightning",
    )
    assert to_microsoft({"module.x": one, "y": two})[0] == {"module.x": one, "y": two}, "not DDP: only some have it"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["head.weight", "head.fc.weight"], "become head.weight without timm's names"),
        (["norm.gamma", "norm.weight", "norm.beta"], "become norm.weight without MindSpore's names"),
    ],
)
def test_two_keys_that_become_one_are_an_error(keys, says):
    with pytest.raises(SwinQuantError, match=f"two keys of the checkpoint {says}"):
        to_microsoft(dict.fromkeys(keys, torch.ones(1)))


@pytest.mark.parametrize("change", ["drop", "shape", "type"])
def test_half_a_qkv_is_an_error(change):
    state = dict(of_transformers("swin-tiny-patch4-window7-224").state)
    key = "swin.encoder.layers.0.blocks.0.attention.self.key.weight"
    tensor = state.pop(key)
    if change != "drop":
        state[key] = tensor[1:] if change == "shape" else tensor.half()
    refused(lambda: to_microsoft(state), "q, k and v of layers.0.blocks.0.attn.qkv.weight")


@pytest.mark.parametrize("inserted", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_names_of_wrapped_parts_are_taken_out_anywhere(tmp_path, inserted):
    state = {"layers.0.blocks.0.norm1.weight": torch.ones(4), "head.weight": torch.ones(2, 4)}
    wrapped = {key.replace("blocks.0.", f"blocks.0.{inserted}."): value for key, value in state.items()}
    torch.save({"model": wrapped}, tmp_path / "x.ckpt")  # no file of MindSpore
    assert open_checkpoint(tmp_path / "x.ckpt").weights().state.keys() == state.keys()
