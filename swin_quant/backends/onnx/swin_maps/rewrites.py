"""Named rewrites of a backbone for export, as `onnx.swin.rewrites` has them for a classifier."""

from collections.abc import Callable
from typing import Any

from swin_quant.backends.onnx.swin_maps.blocks import LoweredMapBlock, MapMerge, MapPatches


def any_size(model: Any) -> None:
    """Windows, patches and their merging as operators that compute with the size at hand, attention of rank 4."""
    model.patch_embed = MapPatches(model.patch_embed)
    for layer in model.layers:
        for index, block in enumerate(layer.blocks):
            layer.blocks[index] = LoweredMapBlock(block)
        if layer.downsample is not None:
            layer.downsample = MapMerge(layer.downsample)


def scale_in_weights(model: Any) -> None:
    """Fold the scale of V1's attention into the rows of q in the qkv weight and bias, so that no operator is left."""
    for layer in model.layers:
        for block in layer.blocks:
            block.attn.fold_scale()


REWRITES: dict[str, Callable[[Any], None]] = {"any-size": any_size, "scale-in-weights": scale_in_weights}
