"""Our own CUDA engine: runs a calibrated Swin as a list of fused kernels, on any GPU with int8 tensor cores.

`spec` describes a model under its policy, `network` packs its tensors, and `launches` writes the launch list of a batch
(`program`). `fusions` merges launches where it pays on the GPU, and `sessions` run them. The kernels are in `kernels`.
"""

from swin_quant.backends.backend import Backend, Exports, Tolerances

BACKEND = Backend(
    name="cuda",
    exports=Exports(
        artifact="cuda",
        export="swin_quant.backends.cuda.export:export",
        options="swin_quant.backends.cuda.export:CudaOptions",
        policies=("cuda", "qdq", "ft-mode1", "ft-mode2", "cuda-fp8"),
        flags=("float_type", "batch", "uint8_input"),
        float_type="float16",
        next_step=("swin-quant verify {file} --data-path {data}",),
        file_name="{name}_{precision}_cuda.safetensors",
        classifiers=("swin", "swinv2"),
    ),
    writes="one file for our own Triton kernels",
    runs_on="GPUs of sm 80 and newer; here an emulator",
    runs=("cuda",),
    load="swin_quant.backends.cuda.engine:load",
    tolerances=Tolerances(quantized=0.05, float32=0.02, half=0.05),
    fast_on="cuda",
    float8=True,
    check_card="swin_quant.backends.cuda.export:check_card",
    inside="swin_quant.backends.cuda.engine:inside",
    float_form="float16",
)
