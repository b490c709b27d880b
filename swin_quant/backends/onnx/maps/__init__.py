"""Backbones as they are exported: maps of any height and width, cut into windows by operators of ONNX's own shapes."""

from swin_quant.backends.onnx.maps.network import MapNetwork
from swin_quant.backends.onnx.maps.rewrites import REWRITES
from swin_quant.backends.onnx.rewriting import Rewriter

REWRITER = Rewriter(REWRITES, MapNetwork, builds_on="any-size")
