"""A residual stream of another size: the logits do not feel it, the maps of a backbone would."""

import pytest
import torch

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError
from tests.outliers import plant


def calibrated(micro, file, where=None):
    model = sq.load(micro / "swinv2.pth", config=micro / "swinv2.yaml")
    if where:
        plant(model.module, where, 100)
    return sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq").save(file)


def test_a_classifier_whose_stream_was_evened_out_is_no_backbone(micro, tmp_path):
    file = calibrated(micro, tmp_path / "planted.pth", "stream")
    assert sq.load(file)(torch.randn(1, 3, 32, 32)).shape[1] > 1
    with pytest.raises(SwinQuantError, match=r"planted.pth: `equalize`.*calibrate the float checkpoint with") as told:
        sq.load(file, output_kind="features")
    assert "\n" not in str(told.value)


def test_advice_names_a_few_of_the_layers_of_a_stream(micro):
    model = sq.load(micro / "swinv2.pth", config=micro / "swinv2.yaml")
    plant(model.module, "stream", 100)
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq", passes=[])
    (told,) = (one["text"] for one in model.card.calibration["advice"] if one["kind"] == "outliers")
    assert "between patch_embed.norm, layers.0.blocks.0.norm1 and " in told and len(told) < 300


def test_one_that_nothing_was_moved_in_is(micro, tmp_path):
    maps = sq.load(calibrated(micro, tmp_path / "plain.pth"), output_kind="features")(torch.randn(1, 3, 32, 32))
    assert len(maps) > 1


def test_a_backbone_keeps_its_maps(micro, tmp_path):
    model = sq.load(micro / "swinv2.pth", config=micro / "swinv2.yaml", output_kind="features")
    plant(model.module, "stream", 100)
    images = torch.randn(8, 3, 32, 32)
    with torch.inference_mode():
        before = model.module(images)
    sq.calibrate(model, [images], "qdq", passes=["equalize"])
    with torch.inference_mode():
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(model.module(images), before, strict=True))
