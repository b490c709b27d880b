"""The branch of a block with its window attention as one operator on maps of any height and width, for plugins."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.network import set_forward
from swin_quant.backends.onnx.swin.attention_operator import WindowConstants, fault_of_branch, inside_windows, is_fast
from swin_quant.backends.onnx.swin.blocks import OrderedBlock
from swin_quant.backends.onnx.swin.int8_operators import CONSTANTS, chosen
from swin_quant.models.maps import Cut


def map_branch(
    x: Tensor,
    *constants: Tensor,
    heads: int,
    scales: Sequence[float],
    norm_last: bool,
    epsilon: float,
    window: Sequence[int],
    shift: Sequence[int],
    pad_first: bool,
) -> Any:
    """The operator in torch: x plus its branch, which has its norm behind `proj` with `norm_last`.

    x: float32 [B, H, W, C], as the result. constants: as of `attention_branch`, without places and regions: they
    follow from `window`, `shift` and `pad_first` (`models.maps.Cut`). Tokens that pad the map are zeros behind the
    norm.
    """
    given: dict[str, Any] = {"heads": heads, "scales": scales, "norm_last": norm_last, "epsilon": epsilon}
    if has_torch_function((x, *constants)):
        given |= {"window": window, "shift": shift, "pad_first": pad_first}
        return handle_torch_function(map_branch, (x, *constants), x, *constants, **given)
    (high, wide), (down, right) = window, shift
    cut = Cut((high, wide), (down, right), pad_first)
    gain, offset, *linears = constants[: 2 + 2 * CONSTANTS]
    table, index, *lengths = constants[2 + 2 * CONSTANTS :]
    windows = cut.partition(x if norm_last else layer_norm(x, x.shape[-1:], gain, offset, epsilon))
    constant, mask = table[:, index][None], cut.mask(x)
    constant = constant if mask is None else constant + mask[:, None]
    y = inside_windows(windows.flatten(1, 2), linears, constant, lengths, heads, scales)
    y = cut.reverse(y.view_as(windows), x)
    return x + (layer_norm(y, x.shape[-1:], gain, offset, epsilon) if norm_last else y)


class OperatorMapBranch(WindowConstants):
    """Windows, norm, attention and addition of a block as one operator: float32 [B, H, W, C] -> [B, H, W, C]."""

    operator = "map_branch"

    def __init__(self, block: OrderedBlock) -> None:
        super().__init__(block)
        attn: Any = block.attn
        self.cut: Cut = attn.cut

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        cut: dict[str, Any] = {"window": self.cut.window, "shift": self.cut.shift, "pad_first": self.cut.pad_first}
        return map_branch(x, *self.constants(), **self.attributes, **cut)


def branch_as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let the first branch of every block on maps call the operator, in place; errors and `is_compiled`: `chosen`."""
    found = {f"{name}.attn": block for name, block in model.named_modules() if isinstance(block, OrderedBlock)}
    faults = {name: fault_of_branch(block) for name, block in found.items()}
    for name in chosen("map_branch", faults, lambda name: is_fast(found[name].attn), is_compiled):
        found[name].attn = OperatorMapBranch(found[name])
        set_forward(found[name], lambda self, x: self.attn(x), "attended")
