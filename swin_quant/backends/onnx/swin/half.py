"""Mixed precision: chooses the parts of a rewritten network that become float16; the rest stays float32.

Float16: weights, products, GELU, attention and the residual stream. Float32: LayerNorm, always (its squares overflow;
TensorRT's own advice), V2's normalisation of q and k, and whatever calibration saw beyond the largest float16. The
residual stream is float16 as in FasterTransformer's kernels and TensorRT's baselines (docs/reference, section 3.8):
float32 would double the traffic of every addition and norm, for a sum whose terms were float16. If one node of it was
seen beyond float16, all of it is float32: the value that overflows is carried on to the end.
"""

from collections.abc import Iterable

import torch
from torch import nn

from swin_quant.backends.onnx.layers import Linear, Pair, StoredWeight, fits_half
from swin_quant.backends.onnx.swin.attention import QuantizedAttention
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedPatchEmbed
from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.models.layers import Swin

_RESULTS = {  # a block's linear -> other nodes that see its result
    "attn.qkv": ("attn.matmul_q_input_quantizer", "attn.matmul_k_input_quantizer", "attn.matmul_v_input_quantizer"),
    "attn.proj": ("add1_local_input_quantizer",),
    "mlp.fc1": ("mlp.fc2._input_quantizer",),
    "mlp.fc2": ("add2_local_input_quantizer",),
}
_NORM_INPUTS = {"attn.proj": "layernorm_input1_quantizer", "mlp.fc2": "layernorm_input2_quantizer"}
_STREAM = ("add1_residual_input_quantizer", "add2_residual_input_quantizer")


def halve(model: Swin, beyond_half: Iterable[str]) -> None:
    """Make `model`, with all rewrites applied, float16, except LayerNorms and layers around nodes in `beyond_half`."""
    wide, unfit = set(beyond_half), []
    # The residual stream, which V1's norms read, too; V2's norms read the branches
    on_stream = {
        f"{name}.{node}"
        for name, block in model.named_modules()
        if isinstance(block, OrderedBlock)
        for node in (_STREAM if block.norm_last else (*_STREAM, *_NORM_INPUTS.values()))
    }
    stream = torch.float32 if wide & on_stream else torch.float16
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module._weight_quantizer.raise_scales()
            fits, weight = _fit(module), module._weight_quantizer
            module.dtype = torch.float32 if wide & _linear_nodes(model, name) or not fits else torch.float16
            module.bias = None if module.bias is None else module.bias.to(module.dtype)
            if weight.scale is None:
                weight.values = weight.values.to(module.dtype)
            else:
                weight.scale = weight.scale.to(module.dtype)
        elif isinstance(module, QuantizedAttention):
            fits = _fit(*(node for node in module.children() if isinstance(node, Pair)))
            seen_beyond = {node for node in wide if node.rpartition(".")[0] == name}
            module.dtype = torch.float32 if seen_beyond or not fits else torch.float16
            module.table = module.table.to(module.dtype)
        elif isinstance(module, OrderedPatchEmbed):
            module.stream, fits = stream, True
        else:
            continue
        unfit += [] if fits else [name]
    if unfit:
        log.warning(
            "%d layers stay float32, because float16 cannot hold their scales: %s", len(unfit), listed(unfit, 3)
        )
    if model.absolute_pos_embed is not None:
        model.absolute_pos_embed.data = model.absolute_pos_embed.data.to(stream)


def _linear_nodes(model: Swin, name: str) -> set[str]:
    """The nodes on a linear's input and output."""
    found = {f"{name}._input_quantizer", f"{name}._aftergemm_quantizer"}
    block, _, layer = name.rpartition(".")
    block, _, part = block.rpartition(".")
    if nodes := _RESULTS.get(f"{part}.{layer}"):
        found |= {f"{block}.{node}" for node in nodes}
        if (norm := _NORM_INPUTS.get(f"{part}.{layer}")) and model.get_submodule(block).norm_last:
            found.add(f"{block}.{norm}")
    return found


def _fit(*modules: nn.Module) -> bool:
    """Whether float16 holds all scales in `modules`."""
    parts = (part for module in modules for part in module.modules() if isinstance(part, Pair | StoredWeight))
    return all(part.scale is None or fits_half(part.scale) for part in parts)
