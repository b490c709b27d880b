"""The engine's kernels: for each a class of its arguments, with a reference in plain torch and a launch.

`reference()` and `launch()` write the same results into the given tensors and return nothing. The Triton functions are
in `jit`, which only a `launch` imports. B: pictures; R: side of a map in tokens; L: tokens of a window; M: rows of a
matrix; N, K: output and input columns of a linear; C: channels. "Half" is float16 or bfloat16.
"""

from collections.abc import Mapping

from swin_quant.backends.cuda.kernels.attention import AttentionKernel
from swin_quant.backends.cuda.kernels.fused import AttentionNormKernel, GemmNormKernel, MlpKernel, NormGemmKernel
from swin_quant.backends.cuda.kernels.gemm import GemmKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.rows import (
    MergeQuantizeKernel,
    NormQuantizeKernel,
    NormResidualKernel,
    PatchEmbedKernel,
    PoolKernel,
)

KERNELS: Mapping[str, type[Kernel]] = {
    "attention": AttentionKernel,
    "attention_norm": AttentionNormKernel,
    "gemm": GemmKernel,
    "gemm_norm": GemmNormKernel,
    "merge_quantize": MergeQuantizeKernel,
    "mlp": MlpKernel,
    "norm_gemm": NormGemmKernel,
    "norm_quantize": NormQuantizeKernel,
    "norm_residual": NormResidualKernel,
    "patch_embed": PatchEmbedKernel,
    "pool": PoolKernel,
}
