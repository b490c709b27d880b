"""The numbers of a Swin's architecture: from the config, and derived for each stage."""

from dataclasses import dataclass

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config import architecture
from swin_quant.config.swin import SWIN, SWINV2


@dataclass(frozen=True)
class Geometry:
    """The architecture in a config; sizes are in pixels, tokens or channels as the names say.

    `whole_windows`: no map clips a window or removes a shift, as in detection code.
    """

    image_size: int
    patch_size: int
    in_chans: int
    classes: int
    embed_dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    mlp_ratio: float
    qkv_bias: bool
    qk_scale: float | None
    drop: float
    drop_path: float
    ape: bool
    patch_norm: bool
    pretrained_windows: tuple[int, ...]
    whole_windows: bool = False

    def resolution(self, stage: int) -> int:
        """Side of the token map of a stage."""
        return self.image_size // self.patch_size // 2**stage

    def window_in_use(self, stage: int) -> int:
        """The window side, clipped to the map."""
        return self.window if self.whole_windows else min(self.window, self.resolution(stage))

    def shift(self, stage: int, block: int) -> int:
        """Odd blocks are shifted by half a window, unless one window covers the map."""
        moves = self.whole_windows or self.resolution(stage) > self.window
        return self.window // 2 if block % 2 and moves else 0


def geometry_of(cfg: CfgNode) -> Geometry:
    """The geometry in a checked config of a Swin. UsageError for another family."""
    if cfg.MODEL.TYPE not in (SWIN.name, SWINV2.name):
        raise UsageError(f"MODEL.TYPE is {cfg.MODEL.TYPE}: this is for {SWIN.name} and {SWINV2.name} only")
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
