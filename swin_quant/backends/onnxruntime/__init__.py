"""ONNX Runtime on the CPU."""

from swin_quant.backends.backend import ONNX_TOLERANCES, Backend, OnnxTarget, Saturation, onnx_target
from swin_quant.base.extras import installing

SKIP_QDQ = "session.disable_quant_qdq=1"  # for float8, which its Q/DQ fusions take for int8: the graph then fails

BACKEND = Backend(
    name="onnxruntime",
    exports=onnx_target(
        OnnxTarget("onnxruntime", int4=True, fp8=True, unsigned=True, fuses_attention=False),
        ("onnxruntime", "qdq", "qdq-unsigned"),
        ("swin-quant verify {file} --data-path {data}",),
    ),
    writes="ONNX with Q/DQ pairs, zero points behind GELU",
    runs_on="ONNX Runtime",
    runs=("onnx",),
    load="swin_quant.backends.onnxruntime.engine:load",
    inside="swin_quant.backends.onnxruntime.engine:inside",
    products="swin_quant.backends.onnxruntime.engine:products",
    needs=("onnxruntime", installing("onnx")),
    home="cpu",
    only_float_type="float32",
    float8=True,
    tolerances=ONNX_TOLERANCES,
    saturation=Saturation(exact_products=True, exact_kernels="session.x64quantprecision=1"),
)
