"""FasterTransformer's Swin: export files for its CUDA ops and TensorRT plugin, and emulate its INT8 kernels.

`slots` describes an op's weight list, `weights` takes the tensors from a model, `layouts` puts them in the kernels'
order. `export` writes the list and compares it with the model, `manifest` reads it back, and `emulator` runs it. Facts:
docs/reference, sections 3, 4 and 6.
"""

from swin_quant.backends.backend import Backend, Exports, Tolerances

KINDS = ("int8", "float16", "float32")  # kinds of its ops

BACKEND = Backend(
    name="fastertransformer",
    exports=Exports(
        artifact="fastertransformer",
        export="swin_quant.backends.fastertransformer.export:export",
        options="swin_quant.backends.fastertransformer.export:FasterTransformerOptions",
        policies=("ft-mode1", "ft-mode2"),
        flags=("sm", "batch", "fix_gelu_bias", "check"),
        float_flags=("float_type",),
        only=True,
        next_step=("swin-quant verify {file} --data-path {data}",),
        file_name="{name}_{precision}_sm80.safetensors",
        classifiers=("swin", "swinv2"),
    ),
    writes="calibrated .pth, weight list, manifest, loader",
    runs_on="FasterTransformer; here an emulator",
    runs=("fastertransformer",),
    load="swin_quant.backends.fastertransformer.emulator:load",
    inside="swin_quant.backends.fastertransformer.emulator:inside",
    tolerances=Tolerances(quantized=0.1, float32=0.01, half=0.01),  # its own parity targets (docs/reference, section 8)
    only_float_type="float16",
    emulates=True,
    only_quantized=True,  # no emulator of its float kernels
)
