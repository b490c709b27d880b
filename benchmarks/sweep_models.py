"""The models of other publishers that `sweep.py` takes, with random weights: of timm, torchvision and transformers."""

import runpy
from typing import Any

import torch
from torch import nn

from swin_quant.base.compat import import_timm, import_torchvision

SIDE = 128  # if the model takes it: more pixels only cost time
TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet50
    resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16
    wide_resnet50_2
""".split()
# The smallest model of each timm module, except giants, as in tests/checkpoint/test_timm_families.py.
TIMM = """
    halonet_h1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240 csatv2
    cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
    efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_b
    hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_v3 lcnetv2_small
    levit_128s lowformer_b0 poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny
    nextvit_small nfnet_l0 pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
    resnest14d resnetv2_18 resnetv2_50x1_bit rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1
    skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224
    tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny vit_tiny_r_s16_p8_224
    vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
""".split()
# Models of transformers by type, with what is smaller than in its default configuration.
_SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "beit": _SMALL,
    "bit": {"depths": [1, 1, 1, 1], "hidden_sizes": [128, 256, 512, 1024]},
    "clip_vision_model": _SMALL,
    "convnext": {"depths": [1, 1, 3, 1], "hidden_sizes": [48, 96, 192, 384]},
    "convnextv2": {"depths": [1, 1, 3, 1], "hidden_sizes": [48, 96, 192, 384]},
    "cvt": {},
    "data2vec-vision": _SMALL,
    "deit": _SMALL,
    "depth_anything": {"depth_estimation_type": "metric", "max_depth": 10},  # "relative" gives zeros here
    "dinov2": _SMALL,
    "dpt": _SMALL
    | {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [48, 96, 192, 192], "fusion_hidden_size": 64},
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "focalnet": {"embed_dim": 48, "depths": [1, 1, 2, 1]},
    "levit": {},
    "mobilenet_v1": {},
    "mobilenet_v2": {},
    "mobilevit": {},
    "poolformer": {},
    "pvt": {},
    "regnet": {"depths": [1, 1, 2, 1], "hidden_sizes": [64, 128, 256, 512], "groups_width": 32},
    "resnet": {"depths": [1, 1, 2, 1]},
    "segformer": {},
    "swiftformer": {},
    "swin": {"depths": [1, 1, 2, 1], "embed_dim": 48, "window_size": 4},
    "swinv2": {"depths": [1, 1, 2, 1], "embed_dim": 48},
}


def everything() -> list[str]:
    """Every `timm:test_*`, one model of each family of timm, torchvision's and those of transformers."""
    names = {"timm": (*import_timm().list_models("test_*"), *TIMM), "tv": TORCHVISION, "hf": TRANSFORMERS}
    return [f"{source}:{name}" for source, models in names.items() for name in models]


def built(name: str) -> tuple[nn.Module, int]:
    """The model, and the side of its pictures.

    Weights are random and seeded, disturbed so that no zero or one hides a fault.
    """
    torch.manual_seed(0)
    if ".py:" in name:
        file, function = name.rsplit(":", 1)
        return runpy.run_path(file)[function]()
    if name.startswith("hf:"):
        module, own = _of_transformers(name.removeprefix("hf:"))
    elif name.startswith("tv:"):
        own = 299 if "inception" in name else 224
        extra = {"init_weights": False} if name in ("tv:googlenet", "tv:inception_v3") else {}
        module = import_torchvision().models.get_model(name.removeprefix("tv:"), weights=None, **extra).eval()
    else:
        timm = import_timm()
        module = timm.create_model(name.removeprefix("timm:")).eval()
        own = module.pretrained_cfg["input_size"][-1]
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.02 * torch.randn_like(value))
        for key, value in module.named_buffers():
            if key.endswith("running_var"):
                value.uniform_(0.5, 2)
        try:
            module(torch.randn(2, 3, SIDE, SIDE))
        except Exception:  # any error means that it does not take them
            return module, own
    return module, min(own, SIDE)


def _of_transformers(kind: str) -> tuple[nn.Module, int]:
    """A model of transformers that ends in a task where it has one, and the side of its pictures."""
    import_torchvision()  # transformers imports it, if it is there
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    for key, value in {"image_size": SIDE, "num_labels": 100, "architectures": [], **TRANSFORMERS[kind]}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    tasks = ("ImageClassification", "DepthEstimation", "SemanticSegmentation")
    heads = [getattr(transformers, f"AutoModelFor{task}") for task in tasks]
    made = next((head for head in heads if type(config) in head._model_mapping), transformers.AutoModel)
    return made.from_config(config).eval(), 126 if kind == "depth_anything" else SIDE
