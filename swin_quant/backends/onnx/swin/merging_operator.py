"""Patch merging as one operator on int8 values, for engines with a plugin for it."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.swin.blocks import OrderedMerging, Reorder
from swin_quant.backends.onnx.swin.int8_linear import complete, constants_of, fault_of, int8_linear
from swin_quant.base.errors import UsageError

FAST_WIDTH = 16  # what divides the channels of its tokens (plugins/openvino/patch_merging.hpp)


def patch_merging(x: Tensor, *constants: Tensor, norm_last: bool, epsilon: float) -> Any:
    """The operator in torch: a norm and an int8 linear of four tokens side by side, the norm last with `norm_last`.

    x: float32 [B, T, C]; the result: float32 [B, T / 4, E]. constants: the places int32 [T] in x of the four tokens of
    each result; weight and bias of the norm [4 C], or [E] if it is last; scale and zero point of the levels that the
    linear takes, its W int8 [4 C, E], the scales of W [E] and the bias [E].
    """
    if has_torch_function((x, *constants)):
        tensors = (x, *constants)
        return handle_torch_function(patch_merging, tensors, *tensors, norm_last=norm_last, epsilon=epsilon)
    places, gain, offset, *linear = constants
    y = x[:, places].reshape(len(x), len(places) // 4, -1)
    y = y if norm_last else layer_norm(y, gain.shape, gain, offset, epsilon)
    y = int8_linear(y, *linear)
    return layer_norm(y, gain.shape, gain, offset, epsilon) if norm_last else y


class OperatorMerging(nn.Module):
    """`OrderedMerging` as one operator: float32 [B, T, C] -> [B, T / 4, 2 C]."""

    operator = "patch_merging"

    def __init__(self, merging: OrderedMerging) -> None:
        super().__init__()
        self.norm: Any = merging.norm
        self.norm_last = not merging.norm_first
        self.reduction = cast("Linear", merging.reduction)
        complete(self.reduction)
        tokens = merging.tokens
        order = merging.to_neighbours
        self.places: Tensor
        self.register_buffer("places", (order.places if isinstance(order, Reorder) else torch.arange(tokens)).int())

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream in the order of the last block."""
        constants = [self.places, self.norm.weight, self.norm.bias, *constants_of(self.reduction)]
        return patch_merging(x, *constants, norm_last=self.norm_last, epsilon=self.norm.eps)


def as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let every patch merging call the operator, in place. UsageError for one that is not all int8.

    With `is_compiled`, asked where it matters, only those with which the compiled operator is fast call it.
    """
    found = {f"{name}.downsample": stage for name, stage in model.named_modules() if _merging(stage)}
    faults = {name: fault_of(stage.downsample.reduction) for name, stage in found.items()}
    if is_compiled:
        fast = {name: one for name, one in found.items() if not faults[name] and _is_fast(one.downsample)}
        found = fast if fast and is_compiled() else {}
    elif fault := next(((name, why) for name, why in faults.items() if why), None):
        raise UsageError(f"‹plugin› patch_merging: {' '.join(fault)}")
    for stage in found.values():
        stage.downsample = OperatorMerging(stage.downsample)


def _merging(stage: Any) -> bool:
    return isinstance(getattr(stage, "downsample", None), OrderedMerging)


def _is_fast(merging: Any) -> bool:
    return merging.reduction._weight_quantizer.values.shape[0] % (4 * FAST_WIDTH) == 0
