"""What is in an ONNX graph and what engines will make of it, by looking only: nothing is run."""

from swin_quant.backends.onnx_reader.inspect.report import Inspection, inspect_model

__all__ = ["Inspection", "inspect_model"]
