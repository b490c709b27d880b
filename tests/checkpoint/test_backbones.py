"""Backbones in other tools' files: names renamed here by hand, and pictures that must give the same maps."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

import swin_quant
from swin_quant.base.compat import import_torchvision
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.models import build_model

SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
KINDS = {"swin": SHAPE, "swinv2": SHAPE | {"PRETRAINED_WINDOW_SIZES": [0, 0]}}
IMAGES = torch.randn(1, 3, 22, 38, generator=torch.Generator().manual_seed(0))


def openmmlab(state):
    """A state_dict as in mmdetection. Its patch merging is nn.Unfold on [B, C, H, W]: channel by channel."""
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
                numbers = torch.arange(value.shape[-1]).view(4, -1)  # our order: neighbour, channel
                # nn.Unfold of a picture whose four pixels hold a channel's numbers shows where each of them goes.
                picture = torch.stack([numbers[[0, 2]], numbers[[1, 3]]]).permute(2, 0, 1).float()  # [C, row, column]
                value = value[..., torch.nn.Unfold(2, stride=2)(picture[None]).flatten().long()]
        found[".".join(words)] = value
    return found


def transformers(state, norm="hidden_states_norms.stage{}."):
    """A state_dict as in transformers' SwinBackbone; its stages count from 1, and the last norm is not used."""
    words = (
        ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
        ("patch_embed.norm.", "embeddings.norm."),
        ("layers.", "encoder.layers."),
        (".norm1.", ".layernorm_before."),
        (".norm2.", ".layernorm_after."),
        (".attn.proj.", ".attention.output.dense."),
        (".attn.", ".attention.self."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    )
    found = {}
    for key, value in state.items():
        if match := re.fullmatch(r"norm(\d)\.(\w+)", key):
            found[norm.format(int(match[1]) + 1) + match[2]] = value
            continue
        for ours, theirs in words:
            key = key.replace(ours, theirs)
        if ".qkv." in key:
            for name, part in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[key.replace("qkv", name)] = part.clone()
        elif "relative_position_index" not in key and "attn_mask" not in key:
            found[key] = value
    return found


def saved_by_transformers(folder, state, config):
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


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
    with pytest.raises(SwinQuantError, match="left, right could each be the model: choose one by weights NAME"):
        load_float(backbone, file)
    torch.save(openmmlab(state) | {"patch_embed.proj.bias": torch.ones(8)}, file)
    with pytest.raises(
        SwinQuantError, match="two keys of the checkpoint become patch_embed.proj.bias without OpenMMLab"
    ):
        load_float(backbone, file)
    torch.save({"conv1.weight": torch.ones(1)}, file)
    with pytest.raises(SwinQuantError, match="does not fit the model"):
        load_float(backbone, file)
    torch.save({f"backbone.{key}": value for key, value in state.items()} | {"rpn_head.w": torch.ones(1)}, file)
    with pytest.raises(SwinQuantError, match="a detector whose backbone is a Swin V1 .*by output_kind features"):
        config_for(file)


SWIN_CONFIG = {
    "model_type": "swin",
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "depths": [2, 2],
    "num_heads": [1, 2],
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
}


@pytest.mark.parametrize(
    ("prefix", "head", "config"),
    [
        ("", {}, SWIN_CONFIG),
        ("backbone.", {"decode_head.x": torch.ones(1)}, {"model_type": "upernet", "backbone_config": SWIN_CONFIG}),
        (
            "model.pixel_level_module.encoder.",
            {"class_predictor.weight": torch.ones(1)},
            {"model_type": "mask2former", "backbone_config": SWIN_CONFIG},
        ),
    ],
)
def test_backbones_of_transformers(prefix, head, config, of_detection, tmp_path):
    """The refusal of the whole model names `output_kind` features, and that loads."""
    model, state = of_detection("swin", PATCH_SIZE=4, WINDOWS="detection", NORM="each")
    inside = {f"{prefix}{key}": value for key, value in transformers(state).items()}
    file = saved_by_transformers(tmp_path / "model", inside | head, config)
    with pytest.raises((SwinQuantError, UsageError), match="output_kind features") as refused:
        config_for(file)
    assert "timm:" not in str(refused.value)
    cfg = config_for(file, {"MODEL.OUTPUT_KIND": "features"})
    found = build_model(cfg)
    load_float(found, file)
    assert same(found.eval(), model)


def test_norms_beside_a_maskformers_swin(of_detection, tmp_path):
    model, state = of_detection("swin", PATCH_SIZE=4, WINDOWS="detection", NORM="each")
    above = "model.pixel_level_module.encoder."
    named = transformers(state, "{}")
    inside = {f"{above}model.{key}": value for key, value in named.items() if not key[0].isdigit()}
    norms = {f"{above}hidden_states_norms.{int(key[0]) - 1}.{key[1:]}": named[key] for key in named if key[0].isdigit()}
    head = {"mask_embedder.x": torch.ones(1)}
    config = {"model_type": "maskformer", "backbone_config": SWIN_CONFIG}
    file = saved_by_transformers(tmp_path / "model", inside | norms | head, config)
    found = build_model(config_for(file, {"MODEL.OUTPUT_KIND": "features"}))
    load_float(found, file)
    assert same(found.eval(), model)


def test_a_swin_v2_of_two_stages_with_four_pretrained_windows(tiny_model, tmp_path):
    """transformers writes four by default, for any depths."""
    model = tiny_model("swinv2", seed=3, PATCH_SIZE=4, **KINDS["swinv2"])
    config = SWIN_CONFIG | {"model_type": "swinv2", "pretrained_window_sizes": [0, 0, 0, 0]}
    weights = {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}
    file = saved_by_transformers(tmp_path / "model", weights, {k: v for k, v in config.items() if k != "id2label"})
    assert config_for(file).MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [0, 0]


LAYOUTS = {
    "detectron2, its own Swin": ("backbone.bottom_up.", dict, "model", ("proposal_generator.w", "roi_heads.w")),
    "detectron2, Mask2Former's": ("backbone.", dict, "model", ("sem_seg_head.predictor.w", "criterion.empty_weight")),
    "mmdetection": ("backbone.", openmmlab, "state_dict", ("neck.w", "rpn_head.w", "roi_head.w")),
    "mmdetection, an average kept beside": ("backbone.", openmmlab, "state_dict", ("bbox_head.w", "query_embed.w")),
    "mmsegmentation": ("backbone.", openmmlab, "state_dict", ("decode_head.w", "auxiliary_head.w")),
    "mmpretrain, self-supervised": ("backbone.", openmmlab, "state_dict", ("neck.w", "head.w")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_with_some_outputs_load_at_another_size(layout, of_detection, tmp_path):
    """`out_indices` (1,) leaves the norm of stage 0 out; the backbone takes pictures of any size."""
    prefix, renamed, above, beside = LAYOUTS[layout]
    model, state = of_detection("swin", WINDOWS="detection", NORM="each")
    kept = {key: value for key, value in renamed(state).items() if not key.startswith("norm0.")}
    content = {f"{prefix}{key}": value for key, value in kept.items()} | {key: torch.ones(2, 2) for key in beside}
    file = tmp_path / "model.pth"
    torch.save({above: content, "meta": {"epoch": 3}, "optimizer": {}}, file)
    cfg = config_for(file, {"MODEL.OUTPUT_KIND": "features", "DATA.IMG_SIZE": 48})
    assert (cfg.MODEL.FEATURES.STAGES, cfg.MODEL.FEATURES.NORM) == ([1], "each")
    found = build_model(cfg)
    load_float(found, file)
    assert torch.equal(found.eval()(IMAGES)[0], model(IMAGES)[1])


@pytest.fixture(scope="module")
def mmpretrain():
    import_torchvision()
    return pytest.importorskip("mmpretrain.models.backbones")


@pytest.mark.slow
@pytest.mark.parametrize(("version", "sizes"), [("", [(224, 224), (448, 448), (224, 320)]), ("V2", [(256, 256)])])
@pytest.mark.parametrize("outputs", [(0, 1, 2, 3), (3,)])
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


@pytest.mark.slow
@pytest.mark.parametrize(("version", "windows"), [(3, "mmpretrain"), (1, "detection")])
def test_the_versions_in_a_state_dict_tell_the_library(version, windows, mmpretrain, tmp_path, caplog):
    """mmpretrain's module has version 3; those of mmdetection and mmsegmentation have torch's own, 1."""
    state = torch.nn.ModuleDict({"backbone": mmpretrain.SwinTransformer(out_indices=(0, 1, 2, 3))}).state_dict()
    assert state._metadata["backbone"] == {"version": 3}
    state._metadata["backbone"] = {"version": version}
    torch.save({"state_dict": state, "meta": {}}, tmp_path / "mm.pth")
    cfg = config_for(tmp_path / "mm.pth", {"MODEL.OUTPUT_KIND": "features"})
    assert cfg.MODEL.FEATURES.WINDOWS == windows and "name a backbone alike" not in caplog.text


@pytest.mark.parametrize(("beside", "windows"), [("decode_head.w", "detection"), ("neck.decoder.0.w", "mmpretrain")])
def test_parts_beside_openmmlabs_names_tell_the_library(beside, windows, of_detection, tmp_path):
    _, state = of_detection("swin", WINDOWS="detection", NORM="each")
    inside = {f"backbone.{key}": value for key, value in openmmlab(state).items()}
    torch.save({"state_dict": inside | {beside: torch.ones(2, 2)}}, tmp_path / "mm.pth")
    cfg = config_for(tmp_path / "mm.pth", {"MODEL.OUTPUT_KIND": "features", "DATA.IMG_SIZE": 32})
    assert cfg.MODEL.FEATURES.WINDOWS == windows
