"""Effects of `equalize` that logits do not show: on the maps of a backbone, and on engines, which apply its factors."""

import pytest
import torch
from nightly import share

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import save_float
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.layer import made_factors
from swin_quant.quant.policy import dequantize
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


@pytest.fixture
def off_centre(micro):
    """make(output_kind) -> a V1 whose channels before attention are far from zero."""

    def make(**how):
        model = sq.load(micro / "swin.pth", config=micro / "swin.yaml", **how)
        with torch.no_grad():
            for norm in (block.norm1 for layer in model.module.layers for block in layer.blocks):
                norm.bias[:4] += 10
        return model

    return make


def test_equalize_keeps_the_maps_of_padded_pictures(off_centre):
    """Padding after a norm is zero beside tokens: attention's answer to it depends on attention's own biases."""
    model, padded = off_centre(output_kind="features"), torch.randn(2, 3, 34, 46)
    with torch.inference_mode():
        before = model.module(padded)
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq", passes=["equalize"])
    assert "units gain" in model.card.calibration["passes"][0]["note"]
    with torch.inference_mode():
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(model.module(padded), before, strict=True))


IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, write_config, randomise):
    """The file of a V2 that every engine runs, with an outlier channel in the last stream."""
    folder = tmp_path_factory.mktemp("uneven")
    config = write_config(folder, "swinv2", EMBED_DIM=32, NUM_HEADS=[1, 2])
    module = randomise(build_model(load_config(config)))
    with torch.no_grad():
        module.layers[-1].blocks[0].norm1.weight[3] *= 30
        module.head.weight[:, 3] = 0
    save_float(module, folder / "v2.pth")
    return folder / "v2.pth", config


@pytest.fixture
def evened(uneven):
    def make(policy):
        return sq.calibrate(sq.load(*uneven), [IMAGES], policy, passes=["equalize"])

    return make


@pytest.mark.slow
@pytest.mark.parametrize("policy, engine", share([("qdq", "onnxruntime"), ("cuda", "cuda")], 2))
def test_engines_compute_with_them(policy, engine, evened, tmp_path):
    model = evened(policy)
    with torch.inference_mode():
        expected = model(IMAGES)
    found = torch.as_tensor(sq.export(model, engine, tmp_path).load()(IMAGES))
    noise = (expected - model.module(IMAGES)).abs().mean()
    assert (found - expected).abs().mean() < max(0.02, noise)


@pytest.mark.slow
def test_fastertransformer_has_no_such_multiplication(evened, uneven, tmp_path):
    with pytest.raises(UsageError, match=r"`equalize` put factors at norm.factors.*under ft-mode1"):
        again = sq.load(evened("qdq").save(tmp_path / "evened.pth"))
        sq.export(sq.calibrate(again, [IMAGES], "ft-mode1", passes=[]), "fastertransformer", tmp_path / "ft")
    model = sq.calibrate(sq.load(*uneven), [IMAGES], "ft-mode1", passes=["equalize"])
    assert not made_factors(model.module)
    assert sq.export(model, "fastertransformer", tmp_path / "ft").file.is_file()


@pytest.mark.slow
def test_other_tools_get_the_names_that_they_know(evened, tmp_path):
    model = evened("qdq")
    plain = sq.load(model.save(tmp_path / "plain.safetensors"))
    assert not made_factors(plain.module)
    with torch.inference_mode():
        dequantize(model.module)
        assert torch.allclose(plain.module(IMAGES), model.module(IMAGES), atol=1e-3)
