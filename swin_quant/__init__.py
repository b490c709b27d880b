"""swin-quant: Swin Transformer V1 and V2 from a float checkpoint to INT8 that was measured."""

import os

# MKL reads this once, at its first call. STRICT makes a matrix product independent of the thread count and
# of the other rows in the batch, so that calibration over 1 or 2 ranks, or batch 1 or 32, is bit-identical.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
