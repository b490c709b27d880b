"""FasterTransformer's scales of a block from the ranges of its nodes (docs/reference, section 3.4).

Its INT8 kernels read them from a list of float32 that was computed in double; every number here is such an entry.
"""

from collections.abc import Mapping

import numpy as np


class FtScales:
    """`ranges`: node of a block, or of its stage's `downsample`, -> |amax|, one number."""

    def __init__(self, ranges: Mapping[str, float]) -> None:
        self._ranges = ranges

    def amax(self, node: str) -> float:
        return _stored(self._ranges[node])

    def step(self, node: str) -> float:
        """From an int8 value to a real one."""
        return _stored(self._ranges[node] / 127)

    def levels(self, node: str) -> float:
        """From a real value to int8."""
        return _stored(127 / self._ranges[node])

    def weight(self, layer: str) -> float:
        return self.amax(f"{layer}._weight_quantizer")

    def gemm(self, layer: str) -> float:
        """From an int32 sum to int8."""
        given, weight, result = (
            self._ranges[f"{layer}.{node}_quantizer"] for node in ("_input", "_weight", "_aftergemm")
        )
        return _stored(given * weight / (127 * result))

    def logits(self, q: str, k: str) -> float:
        """From an int32 sum of q and k to a real logit: a product of float32, divided in double."""
        return _stored(float(np.float32(self.amax(q)) * np.float32(self.amax(k))) / (127 * 127))

    def softmax(self, node: str) -> float:
        """From a probability to int8."""
        return _stored(127 / self.amax(node))

    def context(self, attention: str, v: str, result: str) -> float:
        """From an int32 sum of probabilities and values to int8."""
        product = float(np.float32(self.amax(attention)) * np.float32(self.amax(v)))
        return _stored(product / (127 * self.amax(result)))


def _stored(value: float) -> float:
    return float(np.float32(value))


def as_half(value: float) -> float:
    """A scale as a kernel that works in float16 sees it."""
    return float(np.float16(value))
