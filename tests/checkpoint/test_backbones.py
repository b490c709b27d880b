"""Backbones in others' files: names renamed here by hand, and pictures that must give the same maps."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.identify import config_for

SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
KINDS = {"swin": SHAPE, "swinv2": SHAPE | {"PRETRAINED_WINDOW_SIZES": [0, 0]}}
IMAGES = torch.randn(1, 3, 22, 38, generator=torch.Generator().manual_seed(0))


def openmmlab(state):
    """A state_dict as mmdetection has it. Its patch merging is nn.Unfold on [B, C, H, W]: channel by channel."""
    found = {}
    for key, value in state.items():
        words = key.split(".")
        if words[0] == "patch_embed" and words[1] == "proj":
            words[1] = "projection"
        elif words[0] == "layers":
            words[0] = "stages"
            if words[2] == "blocks" and words[4] == "attn":
                words.insert(5, "w_msa")
            elif words[2] == "blocks" and words[4] == "mlp":
                words[4:6] = {"fc1": ["ffn", "layers", "0", "0"], "fc2": ["ffn", "layers", "1"]}[words[5]]
            elif words[2] == "downsample" and value.shape[-1] == 4 * state["patch_embed.proj.weight"].shape[0]:
                numbers = torch.arange(value.shape[-1]).view(4, -1)  # of ours: neighbour, channel
                # nn.Unfold of a picture whose four pixels carry the numbers of a channel says where each of them goes
                picture = torch.stack([numbers[[0, 2]], numbers[[1, 3]]]).permute(2, 0, 1).float()  # [C, row, column]
                value = value[..., torch.nn.Unfold(2, stride=2)(picture[None]).flatten().long()]
        found[".".join(words)] = value
    return found


def timm_features(state):
    return {
        key.replace("layers.0.downsample", "layers.1.downsample").replace("layers.", "layers_", 1): value
        for key, value in state.items()
    }


@pytest.fixture(scope="session")
def of_detection(tiny_model):
    """make(kind) -> a backbone with a norm for each output, as detection code has it, and its weights."""

    def make(kind, **keys):
        model = tiny_model(kind, seed=3, OUTPUT_KIND="features", **KINDS[kind], **keys)
        return model, {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}

    return make


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one(IMAGES), other(IMAGES), strict=True))


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("renamed", [dict, openmmlab])
def test_backbones_of_detectors(kind, renamed, of_detection, tiny_model, tmp_path, caplog):
    model, state = of_detection(kind, WINDOWS="detection", NORM="each")
    file = tmp_path / "detector.pth"
    inside = {f"backbone.{key}": value for key, value in renamed(state).items()}
    torch.save({"state_dict": inside | {"neck.fpn.weight": torch.ones(1), "bbox_head.fc.bias": torch.ones(1)}}, file)
    cfg = config_for(file, {"MODEL.OUTPUT_KIND": "features", "DATA.IMG_SIZE": 32})
    features = cfg.MODEL.FEATURES
    assert (features.WINDOWS, features.NORM, features.STAGES) == ("detection", "each", [0, 1])
    found = tiny_model(kind, seed=9, OUTPUT_KIND="features", **KINDS[kind], WINDOWS="detection", NORM="each")
    with caplog.at_level("INFO", "swin_quant"):
        load_float(found, file)
    assert same(found, model)
    assert "the backbone is backbone.*, left out: neck.fpn.weight, bbox_head.fc.bias" in caplog.text


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_timms_features_only(kind, of_detection, tiny_model, tmp_path):
    model, state = of_detection(kind)
    torch.save(timm_features(state), tmp_path / "timm.pth")
    found = tiny_model(kind, seed=9, OUTPUT_KIND="features", **KINDS[kind])
    load_float(found, tmp_path / "timm.pth")
    assert same(found, model)


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
    with pytest.raises(SwinQuantError, match="4 missing: norm0.weight"):
        load_float(backbone, file)
    torch.save({f"{name}.{key}": value for name in ("left", "right") for key, value in state.items()}, file)
    with pytest.raises(SwinQuantError, match="holds several backbones, under left., right.: save one alone"):
        load_float(backbone, file)
    torch.save({"conv1.weight": torch.ones(1)}, file)
    with pytest.raises(SwinQuantError, match="does not fit the model"):
        load_float(backbone, file)
    torch.save({f"backbone.{key}": value for key, value in state.items()} | {"rpn_head.w": torch.ones(1)}, file)
    with pytest.raises(SwinQuantError, match="a detector whose backbone is a Swin V1 .*by output_kind features"):
        config_for(file)
