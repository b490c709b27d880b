"""Every node of a model as a row: the policy's decision, its range, and its tensor's shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.ranges import range_of
from swin_quant.quant.watch import watching


@dataclass(frozen=True)
class NodeRow:
    """One node. `amax`: the largest in effect, None without one; `shape` of the tensor for one picture.

    `bounds`: both ends of a range with a zero point; None if it is symmetric, or not calibrated.
    """

    name: str
    role: str
    enabled: bool
    format: str
    bits: int
    per_channel: bool
    block: int | None
    symmetric: bool
    amax: float | None
    bounds: Sequence[float] | None
    shape: tuple[int, ...]


def list_nodes(model: nn.Module, input_shape: Sequence[int]) -> list[NodeRow]:
    """Rows in module order, from one forward pass of zeros with `input_shape`; works on meta tensors."""
    nodes = named_nodes(model)
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, node: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes[name] = tuple(inputs[0].shape)

    with torch.inference_mode(), watching(nodes, record):
        model(torch.zeros(*input_shape, device=next(model.parameters()).device))
    return [
        NodeRow(
            name,
            node.role.value,
            node.setting.enabled,
            node.setting.format,
            node.setting.bits,
            node.setting.per_channel,
            node.setting.block,
            node.setting.symmetric,
            None if node.amax is None else range_of(node).amax,
            None if node.bounds is None or node.setting.symmetric else node.bounds.tolist(),
            shapes[name],
        )
        for name, node in nodes.items()
    ]
