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

from swin_quant.backends.fastertransformer import layouts
from swin_quant.backends.fastertransformer.layouts import WEIGHT_LAYOUTS
from swin_quant.backends.fastertransformer.slots import AMAX_LIST, KERNELS, PACKED, Slot
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin
from swin_quant.models.maps import mask
from swin_quant.models.swin_v2 import LARGEST_LOGIT_SCALE, get_version
from swin_quant.quant.quantizer import named_nodes

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


class WeightSource:
    """The tensors of a model by slot, float32, before quantization and layout; amax lists too.

    FasterTransformer's INT8 exporter first converts everything to float16, so with `int8` exp is taken of a float16
    logit scale. `ranges`: each node's range as the kernels see it, one number: the largest of ranges per channel.
    """

    def __init__(self, model: Swin, int8: bool) -> None:
        self.model, self.int8, self.version = model, int8, get_version(model)
        nodes = named_nodes(model).items()
        self.ranges = {name: node.amax.abs().max().item() for name, node in nodes if node.amax is not None}

    @torch.no_grad()
    def __call__(self, slot: Slot) -> Tensor:
        """The tensor in float32 and in `slot.source`'s shape."""
        if slot.layout == "empty":
            return torch.empty(slot.source)
        inside = slot.name.removesuffix(slot.part)  # the block or stage
        attn: Any = self.model.get_submodule(f"{inside}attn") if len(slot.place) == 2 else None
        match slot.part:
            case "attn.qkv.bias":
                found = attn.qkv.effective_bias()
            case "attn.relative_position_bias" | "attn.trt_relative_position_bias":
                found = attn.relative_position_bias()
            case "attn.logit_scale":
                scale = attn.logit_scale.float()
                found = (scale.half() if self.int8 else scale).clamp(max=LARGEST_LOGIT_SCALE).float().exp()
            case "attn_mask" | "trt_attn_mask":
                # not a block's own mask: a stage of one block has none, but the plugin needs one
                g, stage = self.model.geometry, slot.place[0]
                found = mask(*g.tokens(stage), g.windows(stage), (g.window // 2, g.window // 2))
            case "amaxList" | "h_amaxList":
                ranges = {
                    name.removeprefix(at): amax
                    for at in (f"layers.{slot.place[0]}.", inside)  # the stage's patch merging, and the block
                    for name, amax in self.ranges.items()
                    if name.startswith(at)
                }
                found = amax_list(ranges, self.version)
            case _:
                found = self.model.get_parameter(slot.name)
        return found.detach().float().cpu()

    def weight_range(self, slot: Slot) -> float:
        """The weight's amax, for the slot of a kernel."""
        return self.ranges[slot.name.removesuffix("weight") + "_weight_quantizer"]


def stored_form(slot: Slot, source: WeightSource, g: Geometry) -> Tensor:
    """The tensor of a slot as stored: quantized or cast, in its layout."""
    tensor = source(slot)
    if slot.part in KERNELS and slot.dtype == "int8":
        tensor = layouts.quantize_weight(tensor, source.weight_range(slot))
        return layouts.scatter(tensor, WEIGHT_LAYOUTS[slot.layout])
    tensor = tensor.to(getattr(torch, slot.dtype))
    if slot.part in PACKED and slot.layout != "empty":
        tensor = layouts.pack(tensor, slot.shape[-1])
    elif slot.layout == "gelu-shifted":
        tensor = layouts.shifted(tensor)
    elif slot.layout == "head-interleaved":
        tensor = layouts.exchange_heads(tensor, 3, g.heads[slot.place[0]])
        tensor = tensor.t() if tensor.dim() == 2 else tensor
    return tensor.reshape(slot.shape).contiguous()


def from_stored(slot: Slot, stored: Tensor, g: Geometry) -> Tensor:
    """Undo the layout: `slot.source`'s shape, in the stored type."""
    if slot.layout in WEIGHT_LAYOUTS:
        return stored[WEIGHT_LAYOUTS[slot.layout](*slot.source)]
    if slot.layout == "trt-packed":
        return layouts.unpack(stored, slot.source[-1])
    if slot.layout == "gelu-shifted":
        return layouts.as_read(stored, *slot.source)
    if slot.layout == "head-interleaved":
        return layouts.exchange_heads(stored.t() if stored.dim() == 2 else stored, g.heads[slot.place[0]], 3)
    return stored


def amax_list(ranges: Mapping[str, float], version: int) -> Tensor:
    """float32 [96]. `ranges`: |amax| by node of the block and of its stage's `downsample`, which the last stage
    lacks."""
    values, quads = [0.0] * AMAX_LIST, QUADS | BY_VERSION[version]
    logits = ("mha_q", "mha_k") if version == 2 else ("matmul_q", "matmul_k")
    q, k, a, v = (f"attn.{x}_input_quantizer" for x in (*logits, "matmul_a", "matmul_v"))
    context = "attn.proj._input_quantizer"
    for node, base in quads.items():
        if node in ranges:
            amax = ranges[node]
            values[base : base + 4] = [amax, amax / 127, amax / 127 / 127, 127 / amax]
    for layer, index in WEIGHTS.items():
        if f"{layer}._input_quantizer" in ranges:
            given, weight, result = (
                ranges[f"{layer}.{node}_quantizer"] for node in ("_input", "_weight", "_aftergemm")
            )
            values[index] = weight
            values[GEMMS[layer]] = given * weight / (127 * result)
    values[GEMMS["q k"]] = ranges[q] * ranges[k] / (127 * ranges["attn.softmax_input_quantizer"])
    values[GEMMS["a v"]] = ranges[a] * ranges[v] / (127 * ranges[context])
    stored = torch.tensor(values, dtype=torch.float64).float()
    held = {node: stored[quads[node]] for node in (q, k, a, v, context)}
    stored[FUSED["q k"]] = (held[q] * held[k]).double() / (127 * 127)  # a float32 product divided in double, as NumPy 1
    stored[FUSED["a"]] = 127 / held[a].double()
    stored[FUSED["a v"]] = (held[a] * held[v]).double() / (127 * held[context].double())
    return stored


@dataclass(frozen=True)
class Scales:
    """A block's list by the names of its nodes; every value is a float32."""

    values: Sequence[float]
    version: int

    def amax(self, node: str, place: int = 0) -> float:
        return self.values[(QUADS | BY_VERSION[self.version])[node] + place]

    def step(self, node: str) -> float:
        """A / 127, the factor from int8 to the real value."""
        return self.amax(node, 1)

    def levels(self, node: str) -> float:
        """127 / A, the factor from the real value to int8."""
        return self.amax(node, 3)

    def gemm(self, name: str) -> float:
        """The factor from an int32 sum to int8."""
        return self.values[GEMMS[name]]

    def weight(self, layer: str) -> float:
        return self.values[WEIGHTS[layer]]

    def fused(self, name: str) -> float:
        return self.values[FUSED[name]]
