"""The branch of a block that has its attention, as one operator on int8 values, for engines with a plugin for it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.network import set_forward
from swin_quant.backends.onnx.operators import quantize
from swin_quant.backends.onnx.swin import attention_operator
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention, norm
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, Reorder
from swin_quant.backends.onnx.swin.int8_linear import CONSTANTS, complete, constants_of, fault_of, int8_linear
from swin_quant.base.errors import UsageError

MASKED = -100.0  # what a logit of two tokens of different regions has added


def attention_branch(
    x: Tensor, *constants: Tensor, heads: int, scales: Sequence[float], norm_last: bool, epsilon: float
) -> Any:
    """The operator in torch: x, in another order, plus its branch, which has its norm behind `proj` with `norm_last`.

    x: float32 [B, T, C], as the result. constants: the places int32 [T] in x of the tokens, window by window; weight
    and bias of the norm [C]; scale and zero point of the levels that qkv takes, its W int8 [C, 3C], the scales of W
    [3C] and the bias [3C]; the same for proj, W int8 [C, C]; position biases [heads, P] and which of them two tokens
    have, int32 [L, L]; the region of each token, uint8 [nW, L], for windows in rounds of nW: tokens of two regions do
    not see each other; for V2 the length [heads] to which q is normalised, when k has 1.
    scales: of q, k, v, and of the softmax if it is rounded to int8.
    """
    if has_torch_function((x, *constants)):
        tensors: tuple[Tensor, ...] = (x, *constants)
        given: dict[str, Any] = {"heads": heads, "scales": scales, "norm_last": norm_last, "epsilon": epsilon}
        return handle_torch_function(attention_branch, tensors, *tensors, **given)
    places, gain, offset, *linears = constants[: 3 + 2 * CONSTANTS]
    table, index, regions, *lengths = constants[3 + 2 * CONSTANTS :]
    x = x[:, places]
    y = x if norm_last else layer_norm(x, x.shape[-1:], gain, offset, epsilon)
    y = int8_linear(y, *linears[:CONSTANTS])
    if lengths:
        q, k, v = y.unflatten(-1, (3, heads, -1)).unbind(-3)
        y = torch.stack([q * (lengths[0][:, None] / norm(q)), k / norm(k), v], -3).flatten(-3)
    each = torch.tensor(scales[:3]).repeat_interleave(x.shape[-1])
    proj = linears[CONSTANTS:]
    of_result = float(proj[0])
    constant = (table[:, index] + mask_of(regions)).flatten(0, 1)
    y = attention_operator.attention(quantize(y, each), constant, heads, (*scales, of_result)) * proj[0]
    y = int8_linear(y, *proj)
    return x + (layer_norm(y, x.shape[-1:], gain, offset, epsilon) if norm_last else y)


class OperatorAttentionBranch(nn.Module):
    """The order of tokens, norm, attention and addition of a block as one operator: float32 [B, T, C] -> [B, T, C]."""

    operator = "attention_branch"

    def __init__(self, block: OrderedBlock) -> None:
        super().__init__()
        attn: Any = block.attn
        self.norm: Any = block.norm1
        self.norm_last, self.heads = block.norm_last, attn.heads
        self.scales = attention_operator.scales_of(attn)[:-1]
        self.qkv: Linear = attn.qkv
        self.proj: Linear = attn.proj
        complete(self.qkv)
        complete(self.proj)
        tokens = len(block.order)
        self.places: Tensor
        self.table: Tensor
        self.index: Tensor
        self.regions: Tensor
        self.lengths: Tensor | None
        order = block.to_windows.places if isinstance(block.to_windows, Reorder) else torch.arange(tokens)
        self.register_buffer("places", order.int())
        self.register_buffer("table", attn.table)
        self.register_buffer("index", attn.index)
        self.register_buffer("regions", regions_of(attn.mask, attn.length))
        of_q = attn.head_scale[: self.heads].flatten() if isinstance(attn, CosineAttention) else None
        self.register_buffer("lengths", of_q)

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream in the order of the block before."""
        constants = [self.places, self.norm.weight, self.norm.bias, *constants_of(self.qkv), *constants_of(self.proj)]
        constants += [self.table, self.index, self.regions, *([] if self.lengths is None else [self.lengths])]
        given = {"heads": self.heads, "scales": self.scales, "norm_last": self.norm_last}
        return attention_branch(x, *constants, **given, epsilon=self.norm.eps)


def mask_of(regions: Tensor) -> Tensor:
    """The mask, float32 [nW, 1, L, L], of regions [nW, L]."""
    return torch.where(regions[:, None, :, None] == regions[:, None, None], 0.0, MASKED)


def regions_of(mask: Tensor | None, length: int) -> Tensor:
    """Numbers uint8 [nW, L] that are equal where a mask [nW, 1, L, L] is 0: of windows without mask all are."""
    if mask is None:
        return torch.zeros(1, length, dtype=torch.uint8)
    first = (mask[:, 0] == 0).int().argmax(-1)  # the first token that each one sees
    return torch.stack([row.unique(return_inverse=True)[1] for row in first]).to(torch.uint8)


def as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let the first branch of every block call the operator, in place. UsageError for one that is not all int8.

    With `is_compiled`, asked where it matters, only those with which the compiled operator is fast call it.
    """
    found = {name: block for name, block in model.named_modules() if isinstance(block, OrderedBlock)}
    faults = {name: _fault(block) for name, block in found.items()}
    if is_compiled:
        fast = {name: one for name, one in found.items() if not faults[name] and attention_operator.is_fast(one.attn)}
        found = fast if fast and is_compiled() else {}
    elif fault := next(((name, why) for name, why in faults.items() if why), None):
        raise UsageError(f"‹plugin› attention_branch: {'.attn '.join(fault)}")
    for block in found.values():
        block.attn, block.to_windows = OperatorAttentionBranch(block), nn.Identity()
        set_forward(block, lambda self, x: self.attn(x), "attended")


def _fault(block: Any) -> str | None:
    """The reason why the operator cannot compute the branch of a block; None if it can."""
    around = (block.layernorm_input1_quantizer, block.add1_local_input_quantizer, block.add1_residual_input_quantizer)
    if any(isinstance(node, Pair) for node in around):
        return "rounds more than what its linears take: choose a ‹policy› as qdq or cuda"
    attn: QuantizedAttention = block.attn
    fault = attention_operator.fault_of(attn) or fault_of(attn.qkv) or fault_of(attn.proj)
    if fault or attn.index is None:
        return fault or "has its position bias and mask in one constant: export it without ‹rewrites› of your own"
    is_other = attn.mask is not None and not torch.equal(mask_of(regions_of(attn.mask, attn.length)), attn.mask.float())
    return "has a mask that is not one of regions" if is_other else None
