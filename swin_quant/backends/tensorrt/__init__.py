"""TensorRT: engines built from our ONNX files, run on the caller's CUDA stream, and a report of what runs in int8.

`plan` checks what is to be built, `build` makes an engine, `engine` runs it, `layers` reads what the engine inspector
says; `host` is all that knows the library and the GPU of this machine. `swin_quant.backends` takes `load` from here.
"""

from swin_quant.backends.tensorrt.engine import load

__all__ = ["load"]
