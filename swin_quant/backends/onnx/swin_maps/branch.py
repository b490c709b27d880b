"""The branch of a block with its window attention as one operator on maps of any height and width, for plugins."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm

from swin_quant.backends.onnx.network import OperatorRewrite, set_forward
from swin_quant.backends.onnx.swin.attention_operator import (
    WindowConstants,
    find_branch_fault,
    inside_windows,
    is_fast_branch,
)
from swin_quant.backends.onnx.swin.blocks import OrderedBlock
from swin_quant.backends.onnx.swin.int8_operators import CONSTANTS, holders, plugged
from swin_quant.models.maps import Cut


@plugged
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
) -> Tensor:
    """The operator in torch: x plus its branch, which has its norm behind `proj` with `norm_last`.

    x: float32 [B, H, W, C], as the result. constants: as of `attention_branch`, without places and regions: they
    follow from `window`, `shift` and `pad_first` (`models.maps.Cut`). Tokens that pad the map are zeros behind the
    norm.
    """
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


def _call(block: Any) -> None:
    block.attn = OperatorMapBranch(block)
    set_forward(block, lambda self, x: self.attn(x), "attended")


def _fault(block: Any) -> str | None:
    if block.attn.cut.rests and any(block.attn.cut.shift):
        return "shifts by the size of its map (MODEL.FEATURES.WINDOWS mmpretrain)"
    return find_branch_fault(block)


MAP_BRANCH = OperatorRewrite(holders("attn", OrderedBlock), _fault, is_fast_branch, _call)
