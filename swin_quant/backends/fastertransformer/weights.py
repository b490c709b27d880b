"""The tensors of an op's weight list, from a calibrated model: each in its type and layout."""

import math
from collections.abc import Callable
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
from swin_quant.backends.fastertransformer.scales import amax_list
from swin_quant.backends.fastertransformer.slots import KERNELS, PACKED, Slot
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin
from swin_quant.models.swin_v2 import WindowAttentionV2
from swin_quant.models.windows import attention_mask
from swin_quant.quant.quantizer import named_nodes

DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32}
LARGEST_LOGIT_SCALE = math.log(100.0)


def version_of(model: Swin) -> int:
    """The Swin version, 1 or 2."""
    return 2 if isinstance(model.layers[0].blocks[0].attn, WindowAttentionV2) else 1


def ranges_of(model: Swin) -> dict[str, float]:
    """Each node's range as the kernels see it, one number: the largest of ranges per channel."""
    return {name: node.amax.abs().max().item() for name, node in named_nodes(model).items() if node.amax is not None}


class WeightSource:
    """The tensors of a model by slot, float32, before quantization and layout; amax lists too.

    FasterTransformer's INT8 exporter first converts everything to float16, so with `int8` exp is taken of a float16
    logit scale.
    """

    def __init__(self, model: Swin, int8: bool) -> None:
        self.model, self.int8, self.version, self.ranges = model, int8, version_of(model), ranges_of(model)

    @torch.no_grad()
    def __call__(self, slot: Slot) -> Tensor:
        """The tensor in float32 and in `slot.source`'s shape."""
        special: dict[str, Callable[[Slot], Tensor]] = {
            "attn.qkv.bias": self._qkv_bias,
            "attn.relative_position_bias": self._relative_position_bias,
            "attn.trt_relative_position_bias": self._relative_position_bias,
            "attn.logit_scale": self._logit_scale,
            "attn_mask": self._mask,
            "trt_attn_mask": self._mask,
            "amaxList": self._amax_list,
            "h_amaxList": self._amax_list,
        }
        if slot.layout == "empty":
            return torch.empty(slot.source)
        tensor = special[slot.part](slot) if slot.part in special else self.model.get_parameter(slot.name)
        return tensor.detach().float().cpu()

    def weight_range(self, slot: Slot) -> float:
        """The weight's amax, for the slot of a kernel."""
        return self.ranges[slot.name.removesuffix("weight") + "_weight_quantizer"]

    def _attention(self, slot: Slot) -> Any:
        """The block's WindowAttention; in version 2 WindowAttentionV2."""
        return self.model.layers[slot.in_stage].blocks[slot.in_block].attn

    def _qkv_bias(self, slot: Slot) -> Tensor:
        return self._attention(slot).qkv.effective_bias()

    def _relative_position_bias(self, slot: Slot) -> Tensor:
        return self._attention(slot).relative_position_bias()

    def _logit_scale(self, slot: Slot) -> Tensor:
        scale = self._attention(slot).logit_scale.float()
        return (scale.half() if self.int8 else scale).clamp(max=LARGEST_LOGIT_SCALE).float().exp()

    def _mask(self, slot: Slot) -> Tensor:
        g = self.model.geometry  # not a block's own mask: a stage of one block has none, but the plugin needs one
        return attention_mask(g.resolution(slot.in_stage), g.window_in_use(slot.in_stage), g.window // 2)

    def _amax_list(self, slot: Slot) -> Tensor:
        return amax_list(self._ranges_of_block(slot.in_stage, slot.in_block), self.version)

    def _ranges_of_block(self, stage: int, block: int) -> dict[str, float]:
        of_stage, of_block = f"layers.{stage}.", f"layers.{stage}.blocks.{block}."
        own = {name.removeprefix(of_block): a for name, a in self.ranges.items() if name.startswith(of_block)}
        merging = f"{of_stage}downsample."
        return own | {name.removeprefix(of_stage): a for name, a in self.ranges.items() if name.startswith(merging)}


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
        tensor = interleave_heads(tensor, g.heads[slot.in_stage])
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
        return separate_heads(stored.t() if stored.dim() == 2 else stored, g.heads[slot.in_stage])
    return stored
