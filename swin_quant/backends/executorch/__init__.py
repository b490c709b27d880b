"""ExecuTorch: a program for phones and other small devices, whose linears and convolutions XNNPACK computes in int8."""

from swin_quant.backends.backend import Backend, Exports, Tolerances
from swin_quant.base.extras import installing

BACKEND = Backend(
    name="executorch",
    exports=Exports(
        artifact="executorch",
        export="swin_quant.backends.executorch.export:export",
        options="swin_quant.backends.executorch.export:ExecutorchOptions",
        policies=("executorch",),
        flags=("batch",),
        float_flags=("batch",),
        needs=(("executorch.exir",), "executorch"),
        next_step=("swin-quant verify {file} --data-path {data}",),
        file_name="{name}{kind}_{precision}.pte",
    ),
    writes="an ExecuTorch program for XNNPACK, of one batch size",
    runs_on="ExecuTorch, on phones too",
    runs=("executorch",),
    load="swin_quant.backends.executorch.export:load",
    needs=("executorch", installing("executorch")),
    home="cpu",
    only_float_type="float32",
    # XNNPACK rounds the input of each product by the token, which fake-quant leaves as it is: up to half a step of 255.
    tolerances=Tolerances(quantized=0.03, float32=0.001, half=0.05),
    labels="swin_quant.backends.executorch.export:read_labels",
    check_card="swin_quant.backends.executorch.export:check_card",
)
