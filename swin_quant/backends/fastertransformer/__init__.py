"""FasterTransformer's Swin: the files that its CUDA ops and TensorRT plugin take, and what its INT8 kernels compute.

`slots` says what the list of an op holds, `weights` takes it from a model, `layouts` and `trt_mask` put it in the order
the kernels read; `export` writes it, `stored` reads it back, `check` compares; `emulator` computes from what was read.
Facts: docs/reference, sections 3, 4 and 6.
"""

from swin_quant.backends.backend import Backend, Exports, Tolerances

KINDS = ("int8", "float16", "float32")  # of its ops

BACKEND = Backend(
    name="fastertransformer",
    exports=Exports(
        artifact="fastertransformer",
        export="swin_quant.backends.fastertransformer.export:export",
        options="swin_quant.backends.fastertransformer.export:options_of",
        policies=("ft-mode1", "ft-mode2"),
        flags=("sm", "batch", "fix_gelu_bias", "check"),
        float_flags=("float_type",),
        only=True,
        next_step=("swin-quant verify {file} --checkpoint {checkpoint} --data-path DIR",),
    ),
    runs=("fastertransformer",),
    load="swin_quant.backends.fastertransformer.engine:load",
    inside="swin_quant.backends.fastertransformer.inside:inside",
    tolerances=Tolerances(quantized=0.1, float32=0.01, half=0.01),  # its own parity targets (docs/reference, section 8)
    only_float_type="float16",
    emulates=True,
    only_quantized=True,  # no emulator of its float kernels
)
