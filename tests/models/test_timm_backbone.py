"""Maps and embeddings of timm's models, against timm's `features_only` and `num_classes=0` with the same weights."""

import json
import re

import pytest
import torch
from nightly import share

from swin_quant.base.compat import import_timm
from swin_quant.checkpoint import load_float
from swin_quant.config import from_dict
from swin_quant.models import build_model

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


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_those_of_features_only_at_any_size(name):
    ours = made(name, "features")
    expected = theirs(name, made(name).state_dict(), features_only=True)
    images = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        for one, other in zip(ours(images), expected(images), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ours.output_stages == tuple(range(len(expected.feature_info)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    share(
        [("swinv2_cr_tiny_224", "features"), *((name, "logits") for name in SWINS), ("swin_s3_tiny_224", "embedding")],
        2,
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
