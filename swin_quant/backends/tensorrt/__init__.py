"""TensorRT: engines built from our ONNX files, run on the caller's CUDA stream, and a report of the products in int8.

`build` checks a file, then makes an engine of it, `engine` runs it, `layers` reads the engine inspector's
report, `host` finds the library and the GPU of this machine.
"""

from swin_quant.backends.backend import Backend, OnnxTarget, Tolerances, onnx_target

BACKEND = Backend(
    name="tensorrt",
    exports=onnx_target(
        OnnxTarget(
            "tensorrt", float_type="float16", takes_float16=True, constants=True, symmetric=True, fp8=True, ends=False
        ),
        ("tensorrt", "qdq", "tensorrt-centred", "tensorrt-fp8", "cuda-fp8"),
        ("swin-quant show {file}", "swin-quant export {file} --for tensorrt"),
    ),
    writes="ONNX in mixed precision: float16, float32 norms, int8",
    runs_on="TensorRT: `swin-quant export FILE --for tensorrt` on the GPU",
    runs=("tensorrt",),
    load="swin_quant.backends.tensorrt.engine:load",
    needs=("tensorrt", "pip install tensorrt-cu13 (or -cu12, of your CUDA), on a machine with an NVIDIA GPU"),
    home="cuda",
    float8=True,
    tolerances=Tolerances(quantized=0.1, float32=0.01, half=0.05),  # the same as FasterTransformer's TensorRT plugin
)
