"""The numbers that make a Swin: what a config says of the architecture, and what follows from it for each stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """What a config says of an architecture; sizes in pixels, tokens or channels as the names say."""

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

    def resolution(self, stage: int) -> int:
        """Side of the token map of a stage."""
        return self.image_size // self.patch_size // 2**stage

    def window_in_use(self, stage: int) -> int:
        """The window side, clipped to the map."""
        return min(self.window, self.resolution(stage))

    def shift(self, stage: int, block: int) -> int:
        """Odd blocks are shifted by half a window, unless one window covers the map."""
        return self.window // 2 if block % 2 and self.resolution(stage) > self.window else 0
