"""From a config to a model with freshly initialised weights and named nodes."""

from torch import nn
from yacs.config import CfgNode

from swin_quant.config import architecture
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import LayerNorm, Swin
from swin_quant.models.swin import swin
from swin_quant.models.swin_v2 import SwinV2Block, swin_v2
from swin_quant.quant.quantizer import named_nodes

ARCHITECTURES = {"swin": swin, "swinv2": swin_v2}


def geometry_of(cfg: CfgNode) -> Geometry:
    """The geometry that a checked config describes."""
    a = architecture(cfg)
    return Geometry(
        image_size=cfg.DATA.IMG_SIZE,
        patch_size=a.PATCH_SIZE,
        in_chans=a.IN_CHANS,
        classes=cfg.MODEL.NUM_CLASSES,
        embed_dim=a.EMBED_DIM,
        depths=tuple(a.DEPTHS),
        heads=tuple(a.NUM_HEADS),
        window=a.WINDOW_SIZE,
        mlp_ratio=a.MLP_RATIO,
        qkv_bias=a.QKV_BIAS,
        qk_scale=a.get("QK_SCALE"),
        drop=cfg.MODEL.DROP_RATE,
        drop_path=cfg.MODEL.DROP_PATH_RATE,
        ape=a.APE,
        patch_norm=a.PATCH_NORM,
        pretrained_windows=tuple(a.get("PRETRAINED_WINDOW_SIZES", [0] * len(a.DEPTHS))),
    )


def build_model(cfg: CfgNode) -> Swin:
    """A Swin of `cfg` in evaluation mode, every node off."""
    model = ARCHITECTURES[cfg.MODEL.TYPE](geometry_of(cfg))
    model.apply(_initialise)
    named_nodes(model)
    return model.eval()


def _initialise(module: nn.Module) -> None:
    """Weights for training from scratch: truncated normal; in V2 every branch starts as zero (res-post-norm)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, SwinV2Block):
        for norm in (module.norm1, module.norm2):
            nn.init.zeros_(norm.weight)
            nn.init.zeros_(norm.bias)
    elif isinstance(module, LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
