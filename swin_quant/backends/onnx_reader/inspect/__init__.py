"""Analyses an ONNX graph without running it: its products, its attention, and how engines will treat them."""

from swin_quant.backends.onnx_reader.inspect.report import Inspection, inspect_model

__all__ = ["Inspection", "inspect_model"]
