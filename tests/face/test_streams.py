"""What `equalize` changes and logits do not feel, maps of a backbone would: sizes of a stream, what meets padding."""

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


@pytest.mark.parametrize("verb", ["calibrate", "convert"])
def test_nor_is_what_is_made_of_it(run, micro, pictures, tmp_path, verb):
    file, made = calibrated(micro, tmp_path / "planted.pth", "stream"), tmp_path / "made.pth"
    told = ["--data-path", pictures, "--pictures", 4, "--no-eval", "--output", tmp_path, "--device", "cpu"]
    if verb == "convert":
        assert run("convert", file, "--to", made).code == 0
    done = run("calibrate", made if verb == "convert" else file, *told, "--output-kind", "features")
    assert f"{'made' if verb == 'convert' else 'planted'}.pth: `equalize` changed in it" in done.err
    assert done.code == 1 and not (tmp_path / "swinv2_micro_calib.pth").exists()


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


@pytest.fixture
def off_centre(micro):
    """make(output_kind) -> a V1 whose channels in front of attention are far from zero."""

    def make(**how):
        model = sq.load(micro / "swin.pth", config=micro / "swin.yaml", **how)
        with torch.no_grad():
            for norm in (block.norm1 for layer in model.module.layers for block in layer.blocks):
                norm.bias[:4] += 10
        return model

    return make


def test_padding_meets_in_a_backbone_of_v1_what_it_met(off_centre):
    """Behind a norm there are zeros beside tokens: what attention says of them is in its own biases."""
    model, padded = off_centre(output_kind="features"), torch.randn(2, 3, 34, 46)
    with torch.inference_mode():
        before = model.module(padded)
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq", passes=["equalize"])
    assert "units gain" in model.card.calibration["passes"][0]["note"]
    with torch.inference_mode():
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(model.module(padded), before, strict=True))


def test_a_classifier_of_v1_whose_norms_were_put_around_zero_is_no_backbone(off_centre, tmp_path):
    file = tmp_path / "centred.pth"
    sq.calibrate(off_centre(), [torch.randn(8, 3, 32, 32)], "qdq", passes=["equalize"]).save(file)
    with pytest.raises(SwinQuantError, match=r"centred.pth: `equalize`.*calibrate the float checkpoint with"):
        sq.load(file, output_kind="features")
