"""FasterTransformer's Swin: the files that its CUDA ops and TensorRT plugin take, and what its INT8 kernels compute.

`slots` says what the list of an op holds, `weights` takes it from a model, `layouts` and `trt_mask` put it in the order
the kernels read; `export` writes it, `stored` reads it back, `check` compares; `emulator` computes from what was read.
Facts: docs/reference, sections 3, 4 and 6.
"""

KINDS = ("int8", "float16", "float32")  # of its ops
