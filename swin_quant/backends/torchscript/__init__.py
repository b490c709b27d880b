"""Traced TorchScript, for compilers that read it; nodes are torch's own fake-quantize operators."""

from swin_quant.backends.backend import Backend, Exports, Tolerances

BACKEND = Backend(
    name="torchscript",
    exports=Exports(
        artifact="torchscript",
        export="swin_quant.backends.torchscript.export:export",
        options="swin_quant.backends.torchscript.export:TorchScriptOptions",
        policies=("qdq", "tensorrt"),
        flags=("replace", "plugin"),
        activation_bits=(),
        next_step=("swin-quant verify {file} --data-path {data}",),
        file_name="{name}{kind}_{precision}.torchscript.pt",
    ),
    writes="a traced model with fake-quantize operators",
    runs_on="compilers that read TorchScript",
    runs=("torchscript",),
    load="swin_quant.backends.torchscript.export:load",
    home="cpu",
    only_float_type="float32",
    # torch multiplies by 1 / scale where we divide: a value between two levels may be rounded to the other one.
    tolerances=Tolerances(quantized=0.02, float32=0.001, half=0.05),
    emulates=True,
)
