"""Swins on maps as they are exported: of any height and width, cut into windows by ONNX operators."""

from swin_quant.backends.onnx.rewriting import Rewriter
from swin_quant.backends.onnx.swin.rewrites import scale_in_weights
from swin_quant.backends.onnx.swin_maps.blocks import any_size, network_of
from swin_quant.backends.onnx.swin_maps.operators import translations

REWRITER = Rewriter(
    {"any-size": any_size, "scale-in-weights": scale_in_weights},
    network_of,
    builds_on="any-size",
    translations=translations,
)
