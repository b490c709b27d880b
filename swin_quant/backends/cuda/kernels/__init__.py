"""The engine's kernels, one a file: a class of its arguments, with its reference in plain torch and its launch.

`reference()` and `launch()` write the same results into the tensors that they are given, and return nothing. The
kernels themselves lie in `jit`, which imports Triton: here nothing does before a `launch`. `norm_gemm`, `gemm_norm`,
`attention_norm` and `mlp` do the work of several others.
B: pictures; R: side of a map in tokens; L: tokens a window; M: rows of a matrix; N, K: results and operands of a
linear; C: channels. "Half" is float16 or bfloat16.
"""
