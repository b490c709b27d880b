"""The numbers of a Swin's architecture: from the config, and derived for each stage."""

from dataclasses import dataclass

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config import architecture
from swin_quant.config.sides import clipped, compute_map_size, shown, sides
from swin_quant.config.swin import SWIN, SWINV2


@dataclass(frozen=True)
class Geometry:
    """The architecture in a config; sizes are in pixels, tokens or channels as the names say.

    `whole_windows`: no map clips a window or removes a shift, as in detection code. `rests`: as `models.maps.Cut` has
    it. `image_width`: width of pictures that are not square; `image_size` is then their height. `on_maps`: blocks take
    maps [B, H, W, C] of any size, else the tokens [B, H * W, C] of square pictures.
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
    rests: bool = False
    image_width: int | None = None
    on_maps: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        return self.image_size, self.image_width or self.image_size

    def tokens(self, stage: int) -> tuple[int, int]:
        """Height and width of the token map of a stage."""
        return compute_map_size(self.sides, self.patch_size, stage)

    def windows(self, stage: int) -> tuple[int, int]:
        """Height and width of the windows, each clipped to the map."""
        return (self.window, self.window) if self.whole_windows else clipped(self.window, self.tokens(stage))

    def shifts(self, stage: int, block: int) -> tuple[int, int]:
        """Odd blocks are shifted by half a window, but not along a side that one window covers."""
        half = self.window // 2 if block % 2 else 0
        high, wide = (half if self.whole_windows or side > self.window else 0 for side in self.tokens(stage))
        return high, wide

    def resolution(self, stage: int) -> int:
        """Side of the token map of a stage. UsageError for pictures that are not square."""
        if self.image_width not in (None, self.image_size):
            raise UsageError(
                f"pictures of {shown(self.sides)} are not square, and this target has kernels of squares alone: choose "
                "onnxruntime, openvino or another that takes ONNX files"
            )
        return self.tokens(stage)[0]

    def window_in_use(self, stage: int) -> int:
        """The side of the windows of square pictures."""
        return self.windows(stage)[0]


def read_geometry(cfg: CfgNode) -> Geometry:
    """The geometry in a checked config of a Swin. UsageError for another family."""
    if cfg.MODEL.TYPE not in (SWIN.name, SWINV2.name):
        raise UsageError(f"MODEL.TYPE is {cfg.MODEL.TYPE}: this is for {SWIN.name} and {SWINV2.name} only")
    a, (height, width) = architecture(cfg), sides(cfg.DATA.IMG_SIZE)
    return Geometry(
        image_size=height,
        image_width=None if width == height else width,
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
