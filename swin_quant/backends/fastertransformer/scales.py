"""The 96 floats of a block from which its kernels take every scale (docs/reference, section 3.4).

Quads [A, A/127, A/127^2, 127/A] of each range A, the weights' ranges, then the factors of GEMMs from int32 sums to
int8. They are computed in double and stored as float32; the fused factors are products of stored entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.fastertransformer.slots import AMAX_LIST

REDUCTION = "downsample.reduction"

QUADS = {
    "attn.qkv._input_quantizer": 0,
    "attn.qkv._aftergemm_quantizer": 4,
    "attn.proj._input_quantizer": 8,
    "attn.proj._aftergemm_quantizer": 12,
    "attn.matmul_q_input_quantizer": 16,
    "attn.matmul_k_input_quantizer": 20,
    "attn.matmul_v_input_quantizer": 24,
    "attn.matmul_a_input_quantizer": 28,
    "attn.softmax_input_quantizer": 32,
    "mlp.fc1._input_quantizer": 36,
    "mlp.fc1._aftergemm_quantizer": 40,
    "mlp.fc2._input_quantizer": 44,
    "mlp.fc2._aftergemm_quantizer": 48,
    "downsample.reduction._input_quantizer": 60,
    "downsample.reduction._aftergemm_quantizer": 64,
}
BY_VERSION = {  # V1 never reads its two
    1: {"add1_residual_input_quantizer": 52, "add2_residual_input_quantizer": 56},
    2: {"attn.mha_q_input_quantizer": 52, "attn.mha_k_input_quantizer": 56},
}
WEIGHTS = {"attn.qkv": 72, "attn.proj": 73, "mlp.fc1": 74, "mlp.fc2": 75, REDUCTION: 76}
GEMMS = {"attn.qkv": 77, "attn.proj": 78, "mlp.fc1": 79, "mlp.fc2": 80, "q k": 81, "a v": 82, REDUCTION: 83}
FUSED = {"q k": 85, "a": 86, "a v": 87}

# The operands of attention's products, and the node of their result.
_Q, _K, _V, _A = (f"attn.matmul_{x}_input_quantizer" for x in "qkva")
_PRODUCTS = {
    1: {"q k": (_Q, _K, "attn.softmax_input_quantizer"), "a v": (_A, _V, "attn.proj._input_quantizer")},
    2: {
        "q k": ("attn.mha_q_input_quantizer", "attn.mha_k_input_quantizer", "attn.softmax_input_quantizer"),
        "a v": (_A, _V, "attn.proj._input_quantizer"),
    },
}


def amax_list(ranges: Mapping[str, float], version: int) -> Tensor:
    """float32 [96]. `ranges`: |amax| by node of the block and of its stage's `downsample`, which the last stage
    lacks."""
    values = [0.0] * AMAX_LIST
    for node, base in (QUADS | BY_VERSION[version]).items():
        if node in ranges:
            a = ranges[node]
            values[base : base + 4] = [a, a / 127, a / 127 / 127, 127 / a]
    for layer, index in WEIGHTS.items():
        if f"{layer}._input_quantizer" in ranges:
            given, weight, result = (
                ranges[f"{layer}.{node}_quantizer"] for node in ("_input", "_weight", "_aftergemm")
            )
            values[index] = weight
            values[GEMMS[layer]] = given * weight / (127 * result)
    for product, (left, right, output) in _PRODUCTS[version].items():
        values[GEMMS[product]] = ranges[left] * ranges[right] / (127 * ranges[output])
    stored = torch.tensor(values, dtype=torch.float64).float()
    quads = QUADS | BY_VERSION[version]
    nodes = (*_PRODUCTS[version]["q k"][:2], *_PRODUCTS[version]["a v"])
    q, k, attention, v, context = (stored[quads[node]] for node in nodes)
    stored[FUSED["q k"]] = (q * k).double() / (127 * 127)  # a float32 product divided in double, as NumPy 1 does
    stored[FUSED["a"]] = 127 / attention.double()
    stored[FUSED["a v"]] = (attention * v).double() / (127 * context.double())
    return stored


@dataclass(frozen=True)
class Scales:
    """A block's list by the names of its nodes; every value is a float32."""

    values: Sequence[float]
    version: int

    def amax(self, node: str) -> float:
        return self.values[self._base(node)]

    def step(self, node: str) -> float:
        """A / 127, the factor from int8 to the real value."""
        return self.values[self._base(node) + 1]

    def levels(self, node: str) -> float:
        """127 / A, the factor from the real value to int8."""
        return self.values[self._base(node) + 3]

    def gemm(self, name: str) -> float:
        """The factor from an int32 sum to int8."""
        return self.values[GEMMS[name]]

    def weight(self, layer: str) -> float:
        return self.values[WEIGHTS[layer]]

    def fused(self, name: str) -> float:
        return self.values[FUSED[name]]

    def _base(self, node: str) -> int:
        return (QUADS | BY_VERSION[self.version])[node]
