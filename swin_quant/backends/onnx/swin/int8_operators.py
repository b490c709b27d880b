"""An MLP's branch and a patch merging as one operator each on int8 values, for engines with a plugin for it.

Their int8 linears have five constants each.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.layers import Linear, Pair, StoredWeight
from swin_quant.backends.onnx.network import set_forward
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedMerging
from swin_quant.base.errors import UsageError
from swin_quant.models.maps import neighbours as of_map

CONSTANTS = 5
_MLP_WIDTH, _MLP_HIDDEN = 32, 64  # what divides its widths (plugins/openvino/mlp_fast.hpp)
_MERGING_WIDTH = 32  # what divides the channels of its tokens (plugins/openvino/patch_merging.hpp)


def mlp(x: Tensor, *constants: Tensor, norm_last: bool, epsilon: float) -> Any:
    """The operator in torch: x + fc2(gelu(fc1(norm(x)))), or x + norm(fc2(gelu(fc1(x)))) with `norm_last`.

    x: float32 [..., C], as the result. constants: weight and bias of the norm [C]; scale and zero point of the levels
    that fc1 takes, its W int8 [C, H], the scales of W [H] and the bias [H]; the same for fc2, W int8 [H, C].
    """
    if has_torch_function((x, *constants)):
        tensors = (x, *constants)
        return handle_torch_function(mlp, tensors, *tensors, norm_last=norm_last, epsilon=epsilon)
    gain, offset, *linears = constants
    y = x if norm_last else layer_norm(x, x.shape[-1:], gain, offset, epsilon)
    y = int8_linear(gelu(int8_linear(y, *linears[:CONSTANTS])), *linears[CONSTANTS:])
    return x + (layer_norm(y, x.shape[-1:], gain, offset, epsilon) if norm_last else y)


class OperatorMlp(nn.Module):
    """The norm, the MLP and the addition of a block as one operator: float32 [B, T, C] -> [B, T, C]."""

    operator = "mlp"

    def __init__(self, block: OrderedBlock) -> None:
        super().__init__()
        self.norm: Any = block.norm2
        self.norm_last = block.norm_last
        self.fc1: Linear
        self.fc2: Linear
        for name in ("fc1", "fc2"):
            linear = getattr(block.mlp, name)
            complete(linear)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        constants = [self.norm.weight, self.norm.bias, *constants_of(self.fc1), *constants_of(self.fc2)]
        return mlp(x, *constants, norm_last=self.norm_last, epsilon=self.norm.eps)


def mlp_as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let the second branch of every block call the operator, in place; errors and `is_compiled`: `chosen`."""
    found = {f"{name}.mlp": block for name, block in model.named_modules() if isinstance(block, OrderedBlock)}
    faults = {name: _fault_of_mlp(block) for name, block in found.items()}
    for name in chosen("mlp", faults, lambda name: _is_fast_mlp(found[name].mlp), is_compiled):
        found[name].mlp = OperatorMlp(found[name])
        set_forward(found[name], lambda self, x: self.mlp(self.attended(x)))


def _is_fast_mlp(layer: Any) -> bool:
    width, hidden = layer.fc1._weight_quantizer.values.shape
    return not (width % _MLP_WIDTH or hidden % _MLP_HIDDEN)


def _fault_of_mlp(block: Any) -> str | None:
    """The reason why the operator cannot compute the branch of a block; None if it can."""
    around = (block.layernorm_input2_quantizer, block.add2_local_input_quantizer, block.add2_residual_input_quantizer)
    return fault_around(around) or fault_of(block.mlp.fc1) or fault_of(block.mlp.fc2)


def patch_merging(x: Tensor, *constants: Tensor, norm_last: bool, epsilon: float) -> Any:
    """The operator in torch: a norm and an int8 linear of four tokens side by side, the norm last with `norm_last`.

    x: float32 [B, T, C]; the result: float32 [B, T / 4, E]. constants: weight and bias of the norm [4 C], or [E] if it
    is last; scale and zero point of the levels that the linear takes, its W int8 [4 C, E], the scales of W [E] and the
    bias [E]; the places int32 [T] in x of the four tokens of each result. Without places x is a map [B, H, W, C], and
    the result [B, ceil(H / 2), ceil(W / 2), E]: zeros lie beyond its edges.
    """
    if has_torch_function((x, *constants)):
        tensors = (x, *constants)
        return handle_torch_function(patch_merging, tensors, *tensors, norm_last=norm_last, epsilon=epsilon)
    gain, offset, *rest = constants
    linear, places = rest[:CONSTANTS], rest[CONSTANTS:]
    y = x[:, places[0]].reshape(len(x), len(places[0]) // 4, -1) if places else of_map(x)
    y = y if norm_last else layer_norm(y, gain.shape, gain, offset, epsilon)
    y = int8_linear(y, *linear)
    return layer_norm(y, gain.shape, gain, offset, epsilon) if norm_last else y


class OperatorMerging(nn.Module):
    """`OrderedMerging`, of tokens or of a map, as one operator."""

    operator = "patch_merging"

    def __init__(self, merging: OrderedMerging) -> None:
        super().__init__()
        self.norm: Any = merging.norm
        self.norm_last = not merging.norm_first
        self.reduction = cast("Linear", merging.reduction)
        complete(self.reduction)
        self.places: Tensor | None
        self.register_buffer("places", merging.places)

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream in the order of the last block."""
        constants = [self.norm.weight, self.norm.bias, *constants_of(self.reduction)]
        constants += [] if self.places is None else [self.places]
        return patch_merging(x, *constants, norm_last=self.norm_last, epsilon=self.norm.eps)


def merging_as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let every patch merging call the operator, in place; errors and `is_compiled`: `chosen`."""
    found: dict[str, Any] = {
        f"{name}.downsample": stage
        for name, stage in model.named_modules()
        if isinstance(getattr(stage, "downsample", None), OrderedMerging)
    }
    faults = {name: fault_of(stage.downsample.reduction) for name, stage in found.items()}
    for name in chosen("patch_merging", faults, lambda name: _is_fast_merging(found[name].downsample), is_compiled):
        found[name].downsample = OperatorMerging(found[name].downsample)


def _is_fast_merging(merging: Any) -> bool:
    return merging.reduction._weight_quantizer.values.shape[0] % (4 * _MERGING_WIDTH) == 0


def int8_linear(y: Tensor, scale: Tensor, zero: Tensor, weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """y [..., in], rounded to levels of `scale` around `zero`, times W [in, out] of `scales` [out], plus bias [out]."""
    ends = torch.iinfo(zero.dtype)
    levels = ((y / scale).round() + zero).clamp(ends.min, ends.max) - zero
    return levels * scale @ (weight * scales) + bias


def complete(linear: Linear) -> None:
    """Give a linear all its constants, in place: a zero point, a scale for each column, a bias."""
    node: Any = linear._input_quantizer
    weight: Any = linear._weight_quantizer
    kind = torch.int8 if node.zero_point is None else torch.uint8
    node.register_buffer("zero", torch.tensor(node.zero_point or 0, dtype=kind))
    weight.scale = weight.scale.expand(weight.values.shape[1]).contiguous()
    if linear.bias is None:
        linear.bias = torch.zeros_like(weight.scale)


def constants_of(linear: Linear) -> list[Tensor]:
    """The constants of a complete linear, as `int8_linear` takes them."""
    node: Any = linear._input_quantizer
    weight: Any = linear._weight_quantizer
    return [node.scale, node.zero, weight.values, weight.scale, linear.bias]


def fault_of(linear: Linear) -> str | None:
    """The reason why a linear cannot have these constants; None if it can."""
    node, weight = linear._input_quantizer, linear._weight_quantizer
    if fault := fault_around([linear._aftergemm_quantizer]):
        return fault
    is_eight = isinstance(node, Pair) and node.format == "int8" and not node.offset
    if not is_eight or not isinstance(weight, StoredWeight) or weight.values.dtype != torch.int8:
        return "has a float node: choose ‹policy› qdq or cuda"
    if weight.scale.dim() > 1:
        return "has weights in blocks: choose ‹policy› qdq or cuda"
    return None


def fault_around(nodes: Iterable[Any]) -> str | None:
    """The reason why an operator cannot compute what has these `nodes` beside its linears' inputs; None if it can."""
    rounds = any(isinstance(node, Pair) for node in nodes)
    return "rounds more than the inputs of its linears: choose ‹policy› qdq or cuda" if rounds else None


def chosen(
    plugin: str,
    faults: Mapping[str, str | None],
    is_fast: Callable[[str], bool],
    is_compiled: Callable[[], bool] | None,
) -> list[str]:
    """The modules that call the operator of `plugin`, by name: all of `faults`, name -> why it cannot, None if it can.

    UsageError for one that cannot. With `is_compiled`, asked where it matters, only those with which the compiled
    operator `is_fast`.
    """
    if is_compiled:
        fast = [name for name, fault in faults.items() if not fault and is_fast(name)]
        return fast if fast and is_compiled() else []
    for name, fault in faults.items():
        if fault:
            raise UsageError(f"‹plugin› {plugin}: {name} {fault}")
    return list(faults)
