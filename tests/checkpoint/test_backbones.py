"""Backbones in other tools' files: pictures must give the same maps."""

import importlib
import json

import pytest
import torch
from nightly import share
from safetensors.torch import load_file, save_file

import swin_quant
from swin_quant.base.compat import import_torchvision
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.models import build_model
from tests.checkpoint.published import transformers
from tests.helpers.refusals import refused

SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
KINDS = {"swin": SHAPE, "swinv2": SHAPE | {"PRETRAINED_WINDOW_SIZES": [0, 0]}}
IMAGES = torch.randn(1, 3, 22, 38, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def of_detection(tiny_model):
    """make(kind) -> a backbone with a norm for each output, as in detection code, and its weights."""

    def make(kind, **keys):
        model = tiny_model(kind, seed=3, OUTPUT_KIND="features", **KINDS[kind], **keys)
        return model, {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}

    return make


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one(IMAGES), other(IMAGES), strict=True))


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_backbones_of_detectors(kind, of_detection, tiny_model, tmp_path, caplog):
    model, state = of_detection(kind, WINDOWS="detection", NORM="each")
    file = tmp_path / "detector.pth"
    inside = {f"backbone.{key}": value for key, value in state.items()}
    torch.save({"state_dict": inside | {"neck.fpn.weight": torch.ones(1), "bbox_head.fc.bias": torch.ones(1)}}, file)
    cfg = config_for(file, {"MODEL.OUTPUT_KIND": "features", "DATA.IMG_SIZE": 32})
    features = cfg.MODEL.FEATURES
    assert (features.WINDOWS, features.NORM, features.STAGES) == ("detection", "each", [0, 1])
    found = tiny_model(kind, seed=9, OUTPUT_KIND="features", **KINDS[kind], WINDOWS="detection", NORM="each")
    with caplog.at_level("INFO", "swin_quant"):
        load_float(found, file)
    assert same(found, model)
    assert "the backbone is backbone.*, left out: neck.fpn.weight, bbox_head.fc.bias" in caplog.text


def test_a_classifier_gives_its_maps_without_its_head(tiny_model, tmp_path, caplog):
    classifier = tiny_model("swin", seed=3, **SHAPE)
    torch.save(classifier.state_dict(), tmp_path / "swin.pth")
    found = tiny_model("swin", seed=9, OUTPUT_KIND="features", **SHAPE, STAGES=[0])
    with caplog.at_level("INFO", "swin_quant"):
        load_float(found, tmp_path / "swin.pth")
    assert "no part of the features, left out: layers.0.downsample.reduction.weight" in caplog.text
    weights = classifier.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in found.state_dict().items())


def test_what_does_not_fit_is_one_line(of_detection, tiny_model, tmp_path):
    _, state = of_detection("swin")
    file, backbone = tmp_path / "x.pth", tiny_model("swin", OUTPUT_KIND="features", **SHAPE, NORM="each")
    torch.save(state, file)
    refused(lambda: load_float(backbone, file), "4 missing: norm0.weight")
    torch.save({f"{name}.{key}": value for name in ("left", "right") for key, value in state.items()}, file)
    refused(lambda: load_float(backbone, file), "left, right could each be the model: choose one by weights NAME")
    torch.save(state | {"stages.0.blocks.0.attn.w_msa.qkv.bias": torch.ones(8)}, file)
    two = "two keys of the checkpoint become layers.0.blocks.0.attn.qkv.bias without"
    refused(lambda: load_float(backbone, file), two)
    torch.save({"conv1.weight": torch.ones(1)}, file)
    refused(lambda: load_float(backbone, file), "does not fit the model")
    torch.save({f"backbone.{key}": value for key, value in state.items()} | {"rpn_head.w": torch.ones(1)}, file)
    with pytest.raises(SwinQuantError, match="no Swin classifier .*its maps by output_kind features"):
        config_for(file)


SIZES = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
STAGES = {"out_features": ["stage1", "stage2"]}


@pytest.mark.parametrize(
    ("outer", "prefix", "beside"),
    [
        (None, "", {}),
        ("upernet", "backbone.", {"decode_head.x": torch.ones(1)}),
        ("mask2former", "model.pixel_level_module.encoder.", {"class_predictor.weight": torch.ones(1)}),
        ("maskformer", "model.pixel_level_module.encoder.", {"mask_embedder.x": torch.ones(1)}),
    ],
)
def test_backbones_of_transformers(outer, prefix, beside, tmp_path):
    """The refusal of the whole model names `output_kind` features, and that loads. MaskFormer has a Swin of its own."""
    config = transformers.SwinConfig(**SIZES, **STAGES)
    theirs = transformers.SwinBackbone(config)
    if outer == "maskformer":
        module = importlib.import_module("transformers.models.maskformer.modeling_maskformer_swin")
        theirs = module.MaskFormerSwinBackbone(transformers.MaskFormerSwinConfig(**SIZES, **STAGES))
    for value in theirs.parameters():
        torch.nn.init.normal_(value, std=0.2)
    theirs.eval().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"{prefix}{key}": value for key, value in load_file(file).items()} | beside, file)
    said = config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": outer, "backbone_config": said} if outer else said))
    with pytest.raises(SwinQuantError, match="output_kind features"):
        config_for(file)
    found = build_model(config_for(file, {"MODEL.OUTPUT_KIND": "features"}))
    load_float(found, file)
    images = torch.randn(1, 3, 42, 70)  # every map is larger than a window
    with torch.no_grad():
        for ours, expected in zip(found.eval()(images), theirs(images).feature_maps, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_swin_v2_of_two_stages_with_four_pretrained_windows(tmp_path):
    """transformers writes four by default, for any depths."""
    transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**SIZES)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pretrained_window_sizes"] == [0, 0, 0, 0]
    assert config_for(tmp_path).MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [0, 0]


@pytest.fixture(scope="module")
def mmpretrain():
    import_torchvision()
    return pytest.importorskip("mmpretrain.models.backbones")


@pytest.mark.parametrize(("version", "sizes"), [("", [(224, 224), (448, 448), (224, 320)]), ("V2", [(256, 256)])])
@pytest.mark.parametrize("outputs", share([((0, 1, 2, 3),), ((3,),)], 2))
def test_mmpretrains_backbones_at_their_published_size(version, sizes, outputs, mmpretrain, tmp_path, caplog):
    """At 224 the last map of V1 is one window, which mmpretrain does not shift; at 448 it is four, which it does."""
    torch.manual_seed(0)
    theirs = getattr(mmpretrain, f"SwinTransformer{version}")(out_indices=outputs)
    theirs.eval()  # returns nothing
    for value in theirs.parameters():
        value.data += 0.05 * torch.randn_like(value)
    torch.save({"state_dict": {f"backbone.{key}": x for key, x in theirs.state_dict().items()}}, tmp_path / "mm.pth")
    ours = swin_quant.load(tmp_path / "mm.pth", output_kind="features").module.eval()
    assert ("name a backbone alike" in caplog.text) == (not version and len(outputs) > 1)
    for size in sizes:
        images = torch.randn(1, 3, *size)
        with torch.inference_mode():
            for found, expected in zip(ours(images), theirs(images), strict=True):
                assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    if not version:
        with pytest.raises(UsageError, match="a map of 5 x 5 is smaller than a window of 7, which mmpretrain refuses"):
            ours(torch.randn(1, 3, 160, 160))


@pytest.mark.parametrize(("version", "windows"), [(3, "mmpretrain"), (1, "detection")])
def test_the_versions_in_a_state_dict_tell_the_library(version, windows, mmpretrain, tmp_path, caplog):
    """mmpretrain's module has version 3; those of mmdetection and mmsegmentation have torch's own, 1."""
    state = torch.nn.ModuleDict({"backbone": mmpretrain.SwinTransformer(out_indices=(0, 1, 2, 3))}).state_dict()
    assert state._metadata["backbone"] == {"version": 3}
    state._metadata["backbone"] = {"version": version}
    torch.save({"state_dict": state, "meta": {}}, tmp_path / "mm.pth")
    cfg = config_for(tmp_path / "mm.pth", {"MODEL.OUTPUT_KIND": "features"})
    assert cfg.MODEL.FEATURES.WINDOWS == windows and "name a backbone alike" not in caplog.text
