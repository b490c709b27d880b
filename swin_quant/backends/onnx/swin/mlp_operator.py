"""The branch of a block that has its MLP, as one operator on int8 values, for engines with a plugin for it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.network import set_forward
from swin_quant.backends.onnx.swin.blocks import OrderedBlock
from swin_quant.backends.onnx.swin.int8_linear import CONSTANTS, complete, constants_of, fault_of, int8_linear
from swin_quant.base.errors import UsageError

FAST_WIDTH, FAST_HIDDEN = 16, 64  # what divides its widths (plugins/openvino/mlp_vnni.hpp)


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


def as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let the second branch of every block call the operator, in place. UsageError for one that is not all int8.

    With `is_compiled`, asked where it matters, only those with which the compiled operator is fast call it.
    """
    found = {name: block for name, block in model.named_modules() if isinstance(block, OrderedBlock)}
    faults = {name: _fault(block) for name, block in found.items()}
    if is_compiled:
        found = {name: block for name, block in found.items() if not faults[name] and _is_fast(block.mlp)}
        found = found if found and is_compiled() else {}
    elif fault := next(((name, why) for name, why in faults.items() if why), None):
        raise UsageError(f"‹plugin› mlp: {'.mlp '.join(fault)}")
    for block in found.values():
        block.mlp = OperatorMlp(block)
        set_forward(block, lambda self, x: self.mlp(self.attended(x)))


def _is_fast(layer: Any) -> bool:
    width, hidden = layer.fc1._weight_quantizer.values.shape
    return not (width % FAST_WIDTH or hidden % FAST_HIDDEN)


def _fault(block: Any) -> str | None:
    """The reason why the operator cannot compute the branch of a block; None if it can."""
    around = (block.layernorm_input2_quantizer, block.add2_local_input_quantizer, block.add2_residual_input_quantizer)
    if any(isinstance(node, Pair) for node in around):
        return "rounds more than what its linears take: choose a ‹policy› as qdq or cuda"
    return fault_of(block.mlp.fc1) or fault_of(block.mlp.fc2)
