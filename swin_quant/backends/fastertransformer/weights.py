"""The tensors of an op's weight list, from a calibrated model: each in its type and layout.

A block has 96 floats from which its kernels take every scale (docs/reference, section 3.4): quads [A, A/127, A/127^2,
127/A] of each range A, the weights' ranges, then the factors of GEMMs from int32 sums to int8. They are computed in
double and stored as float32; the fused factors are products of stored entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.fastertransformer import gelu_bias, layouts
from swin_quant.backends.fastertransformer.layouts import (
    WEIGHT_LAYOUTS,
    gather,
    interleave_heads,
    quantize_weight,
    scatter,
    separate_heads,
)
from swin_quant.backends.fastertransformer.slots import AMAX_LIST, KERNELS, PACKED, Slot
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin
from swin_quant.models.maps import mask
from swin_quant.models.swin_v2 import LARGEST_LOGIT_SCALE, get_version
from swin_quant.quant.quantizer import named_nodes

DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32}
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
_OF_LOGITS = {1: ("matmul_q", "matmul_k"), 2: ("mha_q", "mha_k")}


def _products(version: int) -> dict[str, tuple[str, str, str]]:
    """The operands of attention's products, and the node of their result."""
    q, k, a, v = (f"attn.{x}_input_quantizer" for x in (*_OF_LOGITS[version], "matmul_a", "matmul_v"))
    return {"q k": (q, k, "attn.softmax_input_quantizer"), "a v": (a, v, "attn.proj._input_quantizer")}


def collect_ranges(model: Swin) -> dict[str, float]:
    """Each node's range as the kernels see it, one number: the largest of ranges per channel."""
    return {name: node.amax.abs().max().item() for name, node in named_nodes(model).items() if node.amax is not None}


class WeightSource:
    """The tensors of a model by slot, float32, before quantization and layout; amax lists too.

    FasterTransformer's INT8 exporter first converts everything to float16, so with `int8` exp is taken of a float16
    logit scale.
    """

    def __init__(self, model: Swin, int8: bool) -> None:
        self.model, self.int8, self.version, self.ranges = model, int8, get_version(model), collect_ranges(model)

    @torch.no_grad()
    def __call__(self, slot: Slot) -> Tensor:
        """The tensor in float32 and in `slot.source`'s shape."""
        return torch.empty(slot.source) if slot.layout == "empty" else self._tensor(slot).detach().float().cpu()

    def _tensor(self, slot: Slot) -> Tensor:
        match slot.part:
            case "attn.qkv.bias":
                return self._attention(slot).qkv.effective_bias()
            case "attn.relative_position_bias" | "attn.trt_relative_position_bias":
                return self._attention(slot).relative_position_bias()
            case "attn.logit_scale":
                scale = self._attention(slot).logit_scale.float()
                return (scale.half() if self.int8 else scale).clamp(max=LARGEST_LOGIT_SCALE).float().exp()
            case "attn_mask" | "trt_attn_mask":
                # not a block's own mask: a stage of one block has none, but the plugin needs one
                g, stage = self.model.geometry, slot.place[0]
                return mask(*g.tokens(stage), g.windows(stage), (g.window // 2, g.window // 2))
            case "amaxList" | "h_amaxList":
                return amax_list(self._select_block_ranges(*slot.place), self.version)
            case _:
                return self.model.get_parameter(slot.name)

    def weight_range(self, slot: Slot) -> float:
        """The weight's amax, for the slot of a kernel."""
        return self.ranges[slot.name.removesuffix("weight") + "_weight_quantizer"]

    def _attention(self, slot: Slot) -> Any:
        """The block's WindowAttention; in version 2 WindowAttentionV2."""
        stage, block = slot.place
        return self.model.layers[stage].blocks[block].attn

    def _select_block_ranges(self, stage: int, block: int) -> dict[str, float]:
        stage_prefix, block_prefix = f"layers.{stage}.", f"layers.{stage}.blocks.{block}."
        own = {name.removeprefix(block_prefix): a for name, a in self.ranges.items() if name.startswith(block_prefix)}
        merging = f"{stage_prefix}downsample."
        return own | {name.removeprefix(stage_prefix): a for name, a in self.ranges.items() if name.startswith(merging)}


def stored_form(slot: Slot, source: WeightSource, g: Geometry) -> Tensor:
    """The tensor of a slot as stored: quantized or cast, in its layout."""
    tensor = source(slot)
    if slot.part in KERNELS and slot.dtype == "int8":
        tensor = quantize_weight(tensor, source.weight_range(slot))
        return scatter(tensor, WEIGHT_LAYOUTS[slot.layout])
    tensor = tensor.to(DTYPES[slot.dtype])
    if slot.part in PACKED and slot.layout != "empty":
        tensor = layouts.pack(tensor, slot.shape[-1])
    elif slot.layout == "gelu-shifted":
        tensor = gelu_bias.shifted(tensor)
    elif slot.layout == "head-interleaved":
        tensor = interleave_heads(tensor, g.heads[slot.place[0]])
        tensor = tensor.t() if tensor.dim() == 2 else tensor
    return tensor.reshape(slot.shape).contiguous()


def from_stored(slot: Slot, stored: Tensor, g: Geometry) -> Tensor:
    """Undo the layout: `slot.source`'s shape, in the stored type."""
    if slot.layout in WEIGHT_LAYOUTS:
        rows, columns = slot.source
        return gather(stored, rows, columns, WEIGHT_LAYOUTS[slot.layout])
    if slot.layout == "trt-packed":
        return layouts.unpack(stored, slot.source[-1])
    if slot.layout == "gelu-shifted":
        return gelu_bias.as_read(stored, *slot.source)
    if slot.layout == "head-interleaved":
        return separate_heads(stored.t() if stored.dim() == 2 else stored, g.heads[slot.place[0]])
    return stored


def amax_list(ranges: Mapping[str, float], version: int) -> Tensor:
    """float32 [96]. `ranges`: |amax| by node of the block and of its stage's `downsample`, which the last stage
    lacks."""
    values, quads, products = [0.0] * AMAX_LIST, QUADS | BY_VERSION[version], _products(version)
    for node, base in quads.items():
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
    for product, (left, right, output) in products.items():
        values[GEMMS[product]] = ranges[left] * ranges[right] / (127 * ranges[output])
    stored = torch.tensor(values, dtype=torch.float64).float()
    q, k, attention, v, context = (stored[quads[node]] for node in (*products["q k"][:2], *products["a v"]))
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
