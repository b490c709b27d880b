"""Backbones as they are exported: maps of any height and width, cut into windows by operators of ONNX's own shapes."""

from swin_quant.backends.onnx.rewriting import Rewriter
from swin_quant.backends.onnx.swin_maps.network import MapNetwork
from swin_quant.backends.onnx.swin_maps.operators import translations
from swin_quant.backends.onnx.swin_maps.rewrites import REWRITES

REWRITER = Rewriter(REWRITES, MapNetwork, builds_on="any-size", translations=translations)
