"""Our own CUDA engine: a calibrated Swin as a list of fused kernels, on any GPU with int8 tensor cores.

`spec` says what is computed, `launches` writes the list of a batch, `program` is that list as data.
"""
