"""With every node off, logits are timm's, with the same random weights; `tests/checkpoint` has published models."""

import pytest
import torch
from nightly import share

from swin_quant.base.compat import import_timm
from swin_quant.checkpoint.names import to_microsoft
from swin_quant.config import find_config, load_config
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


@pytest.mark.slow
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
