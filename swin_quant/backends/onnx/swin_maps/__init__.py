"""Backbones as they are exported: maps of any height and width, cut into windows by ONNX operators."""

from swin_quant.backends.onnx.rewriting import Rewriter
from swin_quant.backends.onnx.swin.rewrites import scale_in_weights
from swin_quant.backends.onnx.swin_maps.blocks import MapNetwork, any_size
from swin_quant.backends.onnx.swin_maps.operators import translations

REWRITER = Rewriter(
    {"any-size": any_size, "scale-in-weights": scale_in_weights},
    MapNetwork,
    builds_on="any-size",
    translations=translations,
)
