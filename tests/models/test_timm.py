"""With every node off, logits are timm's, with the same random weights; `tests/checkpoint` has published models."""

import json
import re

import pytest
import torch
from nightly import share

from swin_quant.base.compat import import_timm
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.names import to_microsoft
from swin_quant.config import find_config, from_dict, load_config
from swin_quant.models import build_model

# our config, timm's model: shallow and narrow, with published windows, shifts and resolutions
SLIM = [
    ("swin_base_patch4_window12_384_finetune", "swin_base_patch4_window12_384"),
    ("swin_tiny_c24_patch4_window8_256", None),
    ("swinv2_tiny_patch4_window16_256", "swinv2_tiny_window16_256"),
    ("swinv2_base_patch4_window12_192_22k", "swinv2_base_window12_192"),
    ("swinv2_base_patch4_window12to16_192to256_22kto1k_ft", "swinv2_base_window12to16_192to256"),
    ("swinv2_base_patch4_window12to24_192to384_22kto1k_ft", "swinv2_base_window12to24_192to384"),
]


@pytest.mark.parametrize(("name", "timm_name"), share(SLIM, 2), ids=[name for name, _ in SLIM])
def test_every_window_and_pretrained_window(name, timm_name, randomise):
    heads = [4, 8, 16, 32] if "c24" in name else [1, 2, 4, 8]
    width = 96 if "c24" in name else 32
    kind = "SWINV2" if name.startswith("swinv2") else "SWIN"
    slim = {"EMBED_DIM": width, "DEPTHS": [2, 2, 2, 2], "NUM_HEADS": heads}
    overrides = {f"MODEL.{kind}.{key}": value for key, value in slim.items()} | {"MODEL.NUM_CLASSES": 100}
    cfg = load_config(find_config(name), overrides=overrides)
    timm_geometry = {"embed_dim": width, "depths": (2, 2, 2, 2), "num_heads": tuple(heads), "num_classes": 100}
    if timm_name is None:  # timm publishes no such model, but its class can build it
        timms = import_timm().models.SwinTransformer(img_size=256, window_size=8, **timm_geometry)
    else:  # image size, window and pretrained windows are timm's own
        timms = import_timm().create_model(timm_name, **timm_geometry)
    randomise(timms, seed=1)
    state, convention = to_microsoft(timms.state_dict())
    ours = build_model(cfg)
    loaded = ours.load_state_dict(state, strict=False)
    assert convention == "timm" and not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {name for name, _ in ours.named_buffers()}
    x = torch.randn(2, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
    with torch.inference_mode():
        expected, logits = timms.eval()(x), ours(x)
    assert (expected[0] - expected[1]).std() > 0.02  # the pictures matter, and so do the branches
    assert (logits - expected).abs().max() < 1e-5


MICRO = {
    "resnet18": {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 16]},
    "convnext_atto": {"depths": [1, 1, 2, 1], "dims": [8, 16, 16, 16]},
    "mobilenetv3_small_050": {},
}
SWINS = {
    "swin_s3_tiny_224": {"window_size": (7, 4, 2, 2)},
    "swinv2_tiny_window8_256": {"img_size": 64, "window_size": 4},
    "swinv2_cr_tiny_224": {"img_size": 64, "window_size": 2},
}
RESNET = "resnet18"
NAMES = [
    RESNET,
    pytest.param("convnext_atto", marks=pytest.mark.kernels),
    pytest.param("mobilenetv3_small_050", marks=pytest.mark.slow),  # it has all its blocks
]


def made(name, kind="logits", stages=(), side=32, **options):
    given = {"ARCHITECTURE": name, "OPTIONS": json.dumps(options or MICRO[name])}
    model = {"TYPE": "timm", "NAME": name, "NUM_CLASSES": 3, "DROP_PATH_RATE": 0.0, "TIMM": given, "OUTPUT_KIND": kind}
    cfg = from_dict({"DATA": {"IMG_SIZE": side}, "MODEL": {**model, "FEATURES": {"STAGES": list(stages)}}}, "test")
    torch.manual_seed(0)
    return build_model(cfg)


def theirs(name, state, **options):
    """timm's own model with a classifier's weights, whose `stages.0` it calls `stages_0` in a list."""
    model = import_timm().create_model(name, **options, **MICRO[name])
    wanted = model.state_dict()
    flat = {re.sub(r"^(stem|stages)\.", r"\1_", key): value for key, value in state.items()}
    model.load_state_dict({key: (flat | state)[key] for key in wanted}, strict=True)
    return model.eval()


@pytest.mark.parametrize("name", share(NAMES[:1] + ["convnext_atto", "mobilenetv3_small_050"], 3))
def test_maps_are_those_of_features_only_at_any_size(name):
    ours = made(name, "features")
    expected = theirs(name, made(name).state_dict(), features_only=True)
    images = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        for one, other in zip(ours(images), expected(images), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ours.output_stages == tuple(range(len(expected.feature_info)))


@pytest.mark.parametrize(
    ("name", "kind"),
    share(
        [("swin_s3_tiny_224", "embedding"), ("swinv2_cr_tiny_224", "features"), *((name, "logits") for name in SWINS)],
        5,
    ),
)
def test_timms_own_files_of_its_swins_load(name, kind, tmp_path):
    """timm starts a stage with its patch merging, Microsoft ends it with one."""
    options = {"img_size": 56, "embed_dim": 8, "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1)} | SWINS[name]
    torch.manual_seed(1)
    expected = import_timm().create_model(name, num_classes=3, **options).eval()
    torch.save(expected.state_dict(), tmp_path / "timm.pth")
    ours = made(name, kind, side=options["img_size"], **options)
    load_float(ours, tmp_path / "timm.pth")
    images = torch.randn(2, 3, options["img_size"], options["img_size"])
    with torch.inference_mode():
        if kind == "features":
            theirs = expected.forward_intermediates(images, intermediates_only=True)
        else:
            theirs = expected.forward_head(expected.forward_features(images), pre_logits=kind == "embedding")
        torch.testing.assert_close(ours(images), theirs)
