"""ONNX with explicit Q/DQ: one exporter for TensorRT, ONNX Runtime and OpenVINO, with named rewrites of the model."""

from swin_quant.backends.backend import Backend, OnnxTarget, onnx_target

BACKEND = Backend(
    name="onnx",
    exports=onnx_target(
        OnnxTarget("portable", takes_float16=True, int4=True, fp8=True, npu=True),
        ("qdq", "tensorrt-fp8", "cuda-fp8", "a16", "a16-qnn"),
        ("swin-quant show {file}", "swin-quant evaluate {file} --no-accuracy"),
    ),
    writes="ONNX with symmetric Q/DQ pairs",
    runs_on="ONNX Runtime, OpenVINO",
    labels="swin_quant.backends.onnx_reader.file:read_labels",
    check_card="swin_quant.backends.onnx_reader.file:check_card",
    restore="swin_quant.backends.onnx.network:restoring",
)
