"""The engine's kernels, one a file: a class of the kernel's arguments, with a reference in plain torch and a launch.

`reference()` and `launch()` write the same results into the given tensors and return nothing. The Triton functions are
in `jit`, which only a `launch` imports. `norm_gemm`, `gemm_norm`, `attention_norm` and `mlp` are fused from other
kernels. B: pictures; R: side of a map in tokens; L: tokens of a window; M: rows of a matrix; N, K: output and input
columns of a linear; C: channels. "Half" is float16 or bfloat16.
"""
