"""Models at other picture and window sizes: logits against timm's, which has its own code for resizing."""

import importlib
import json

import pytest
import torch
from torch.nn.functional import interpolate

import swin_quant as sq
from swin_quant.base.compat import import_timm
from swin_quant.checkpoint import load_calibrated, load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.config import to_dict
from swin_quant.config.sides import sides
from swin_quant.quant.quantizer import named_nodes
from tests.helpers.refusals import refused
from tests.helpers.settings import change

NAMES = {"swin": "swin_tiny_patch4_window7_224", "swinv2": "swinv2_tiny_window8_256"}
BIAS = "layers.0.blocks.0.attn.relative_position_bias_table"


def shape(image, window, kind="swin", **more):
    more |= {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
    return {"IMG_SIZE": image, "PATCH_SIZE": 2, "WINDOW_SIZE": window, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2], **more}


@pytest.mark.parametrize(("image", "window"), [(32, 8), (32, 4), (64, 4), (64, 8), (24, 6), ([24, 40], 8)])
@pytest.mark.parametrize("kind", NAMES)
def test_timms_weights_at_another_size_give_timms_logits(kind, image, window, tiny_model, tmp_path, caplog):
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 10, "patch_size": 2}
    torch.manual_seed(3)
    theirs = import_timm().create_model(NAMES[kind], **sizes, img_size=32, window_size=8)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = theirs.state_dict()
    torch.save(state, tmp_path / "timm.pth")
    resized = import_timm().create_model(NAMES[kind], **sizes, img_size=image, window_size=window).eval()
    module = importlib.import_module(type(resized).__module__)
    resized.load_state_dict(module.checkpoint_filter_fn(dict(state), resized))
    ours = tiny_model(kind, EMBED_DIM=16, **shape(image, window, kind))
    assert load_float(ours, tmp_path / "timm.pth").format == "pth, timm names"
    pictures = torch.randn(2, 3, *sides(image))
    with torch.no_grad():
        torch.testing.assert_close(ours(pictures), resized(pictures), rtol=1e-5, atol=1e-5)
    if kind == "swin" and (window != 8 or image == [24, 40]):
        assert "tables of positions were interpolated as timm's code does" in caplog.text


def test_microsofts_tables_are_interpolated_as_by_microsoft(tiny_model, tmp_path, caplog):
    """[L, heads] -> [heads, S, S], resized bicubically, and back; positions [1, L, C] likewise."""
    source, made = tiny_model("swin", seed=3, **shape(32, 4, APE=True)), tiny_model("swin", **shape(48, 6, APE=True))
    state = source.state_dict()
    torch.save({"model": state}, tmp_path / "x.pth")
    load_float(made, tmp_path / "x.pth")
    biases = interpolate(state[BIAS].permute(1, 0).view(1, 1, 7, 7), size=(11, 11), mode="bicubic")
    assert torch.equal(made.state_dict()[BIAS], biases.view(1, 121).permute(1, 0))
    positions = state["absolute_pos_embed"].reshape(1, 16, 16, -1).permute(0, 3, 1, 2)
    positions = interpolate(positions, size=(24, 24), mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)
    assert torch.equal(made.state_dict()["absolute_pos_embed"], positions)
    assert "5 tables of positions were interpolated as Microsoft's code does: absolute_pos_embed [1, 256" in caplog.text
    assert "computed anew: the file has WINDOW_SIZE 4, IMG_SIZE 32, the configuration WINDOW_SIZE 6, IMG" in caplog.text


@pytest.mark.parametrize("kind", NAMES)
def test_masks_of_another_size_decide_nothing(kind, tiny_model, tmp_path):
    source, made = tiny_model(kind, seed=3, **shape(64, 4, kind)), tiny_model(kind, **shape(32, 4, kind))
    torch.save(source.state_dict(), tmp_path / "x.pth")
    masks = {key: value.clone() for key, value in made.state_dict().items() if key.endswith("attn_mask")}
    load_float(made, tmp_path / "x.pth")
    now = made.state_dict()
    assert masks and all(torch.equal(now[key], value) for key, value in masks.items())
    weights = {key: value for key, value in source.state_dict().items() if key not in masks}
    assert all(torch.equal(now[key], value) for key, value in weights.items() if not key.endswith("attn_mask"))


def test_ranges_are_of_their_size_alone(tiny_model, tmp_path):
    source, made = tiny_model("swin", seed=3, **shape(32, 4)), tiny_model("swin", **shape(48, 6))
    for node in named_nodes(source).values():
        node.amax = torch.tensor(1.0)
        change(node, enabled=True)
    torch.save(source.state_dict(), tmp_path / "x.pth")
    refused(lambda: load_calibrated(made, tmp_path / "x.pth"), "the file has WINDOW_SIZE 4, IMG_SIZE 32")


def test_a_wider_v2_keeps_the_coordinates_that_it_was_trained_on(tiny_model, tmp_path):
    """Microsoft's fine-tuned configurations say the same: window12to16 has PRETRAINED_WINDOW_SIZES of 12."""
    source = tiny_model("swinv2", seed=3, **shape(64, 8, "swinv2"))
    torch.save(source.state_dict(), tmp_path / "x.pth")
    (tmp_path / "own.yaml").write_text(json.dumps(to_dict(config_for(tmp_path / "x.pth"))))
    named = sq.load(tmp_path / "x.pth", tmp_path / "own.yaml", img_size=128, window=16)
    wider = sq.load(tmp_path / "x.pth", img_size=128, window=16)
    for each in (named, wider):
        assert each.config.MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [8, 8]
    table = "layers.0.blocks.0.attn.relative_coords_table"
    before, now = source.state_dict()[table], wider.module.state_dict()[table]
    torch.testing.assert_close(now[:, 8:-8, 8:-8], before, msg="the places that both have are where they were")
    same = sq.load(tmp_path / "x.pth", img_size=128, window=8)
    assert same.config.MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [0, 0]
