"""Written files have FasterTransformer's layout, are read back bit for bit, and are whole or absent."""

import pytest
import torch
from safetensors.torch import load_file

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import load_calibrated, save_calibrated, save_float
from swin_quant.checkpoint.opened import is_calibrated
from swin_quant.checkpoint.save import calibrated_state
from swin_quant.models import build_model
from swin_quant.quant.quantizer import named_nodes
from tests.helpers.settings import small_config


def model(kind, seed=0):
    torch.manual_seed(seed)
    made = build_model(small_config(kind, DEPTHS=[2, 2, 6, 2], NUM_HEADS=[1, 2, 4, 8]))
    for index, node in enumerate(named_nodes(made).values()):
        node.amax = torch.tensor(0.5 + index / 7)
    return made


@pytest.mark.parametrize(("kind", "nodes"), [("swin", 285), ("swinv2", 309)])
def test_the_layout_is_fastertransformers(tmp_path, kind, nodes):
    made = model(kind)
    save_calibrated(made, tmp_path / "x_calib.pth")
    state = torch.load(tmp_path / "x_calib.pth", weights_only=True)
    ranges = {key: value for key, value in state.items() if key.endswith("_amax")}
    assert len(ranges) == nodes and is_calibrated(state)
    assert all(value.shape == () and value.dtype is torch.float32 and value > 0 for value in ranges.values())
    assert "layers.0.blocks.0.attn.qkv._input_quantizer._amax" in ranges
    assert all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in state.values())
    index = state["layers.0.blocks.1.attn.relative_position_index"]
    assert index.dtype is torch.int64 and index.shape == (16, 16)
    assert state["layers.0.blocks.1.attn_mask"].shape == (16, 16, 16)
    assert ("layers.0.blocks.0.attn.logit_scale" in state) == (kind == "swinv2")
    assert state.keys() == made.state_dict().keys()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_what_was_saved_comes_back_bit_for_bit_and_saves_to_the_same_bytes(tmp_path, kind):
    made = model(kind)
    save_calibrated(made, tmp_path / "x.pth")
    torch.save({"model": made.state_dict(), "epoch": 3}, tmp_path / "qat.pth")  # as FasterTransformer's QAT writes it
    for name in ("qat.pth", "x.pth"):
        again = model(kind, seed=1)
        load_calibrated(again, tmp_path / name)
        one, two = made.state_dict(), again.state_dict()
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    save_calibrated(again, tmp_path / "y.pth")
    assert (tmp_path / "x.pth").read_bytes() == (tmp_path / "y.pth").read_bytes()


@pytest.mark.parametrize("share", [1, 0.9])
def test_ranges_of_rows_that_follow_from_the_weight_are_saved_as_the_range_of_the_tensor_others_as_they_are(share):
    made, name = model("swin"), "layers.0.blocks.0.attn.qkv._weight_quantizer"
    weight = made.layers[0].blocks[0].attn.qkv.weight.detach()
    ranges = share * weight.abs().amax(dim=1, keepdim=True)
    named_nodes(made)[name].amax = ranges
    assert torch.equal(calibrated_state(made)[f"{name}._amax"], weight.abs().max() if share == 1 else ranges)


@pytest.mark.parametrize("amax", [None, torch.tensor(0.0), torch.tensor(float("nan")), torch.tensor(float("inf"))])
def test_a_model_with_a_node_that_has_no_range_is_not_saved(tmp_path, amax):
    made = model("swin")
    name = "layers.2.blocks.5.mlp.fc2._input_quantizer"
    named_nodes(made)[name].amax = amax
    with pytest.raises(SwinQuantError, match=f"1 nodes have no .*{name}"):
        save_calibrated(made, tmp_path / "x.pth")
    assert not list(tmp_path.iterdir())


def test_float_weights_are_saved_as_microsoft_does(tmp_path):
    made = model("swin")
    save_float(made, tmp_path / "x.pth")
    content = torch.load(tmp_path / "x.pth", weights_only=True)
    assert list(content) == ["model"] and not is_calibrated(content["model"])
    assert content["model"].keys() == {key for key in made.state_dict() if not key.endswith("_amax")}


def test_tables_stay_float32_in_a_half_precision_file(tmp_path):
    made = model("swinv2")
    save_float(made, tmp_path / "x.safetensors", torch.float16)
    state = load_file(tmp_path / "x.safetensors")
    table = "layers.0.blocks.0.attn.relative_coords_table"
    assert state["head.weight"].dtype == torch.float16
    assert torch.equal(state[table], made.get_buffer(table))
