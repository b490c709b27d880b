"""Every family of timm's models loads from timm's own file and computes the same; weights are random.

Building each takes seconds: CI runs a few, `make nightly` all.
"""

import pytest
import torch
from safetensors.torch import save_file

from swin_quant.base.compat import import_timm
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.identify import config_given
from swin_quant.models import build_model

# The smallest model of each module of timm.
SMALLEST = """
    halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext cpubone_nano
    crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c
    dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1
    efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf
    gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t
    inception_next_atto inception_v3 lcnetv2_small levit_128s lowformer_b0 test_mambaout test_coatnet
    poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny nextvit_small
    test_nfnet pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d
    test_resnet resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050
    swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224 tiny_vit_5m_224
    tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos
    vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
""".split()
CHOSEN = ("resnetv2_18", "test_vit")
CASES = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in CHOSEN)) for name in SMALLEST]
HEADLESS = {"vit_tiny_patch16_dinov3_qkvb", "sam2_hiera_tiny"}  # without classes: they give an embedding


@pytest.mark.parametrize("name", CASES)
def test_a_family_loads_and_computes_what_timm_computes(name, tmp_path):
    torch.manual_seed(0)
    theirs = import_timm().create_model(name).eval()
    with torch.no_grad():
        for value in theirs.parameters():  # no zero or one may hide a missing weight
            value.add_(0.02 * torch.randn_like(value))
        for key, value in theirs.named_buffers():
            if key.endswith("running_var"):
                value.uniform_(0.5, 2)
    file = tmp_path / "model.safetensors"
    save_file({key: value.clone() for key, value in theirs.state_dict().items()}, file)
    kind = {"MODEL.OUTPUT_KIND": "embedding"} if name in HEADLESS else {}
    cfg = config_given(f"timm:{name}", str(file), overrides=kind)
    ours = build_model(cfg).eval()
    load_float(ours, file)
    images = torch.randn(1, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
    with torch.inference_mode():
        expected, given = theirs(images), ours(images)
    assert expected.std() > 0
    assert (given - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_the_classes_of_a_file_are_those_of_its_head(tmp_path):
    """The name alone gives ImageNet's 1,000."""
    file = tmp_path / "mine.safetensors"
    save_file(import_timm().create_model("test_resnet", num_classes=10).state_dict(), file)
    assert config_given("timm:test_resnet", file).MODEL.NUM_CLASSES == 10
    assert config_given("timm:test_resnet", file, ("MODEL.NUM_CLASSES", "3")).MODEL.NUM_CLASSES == 3
