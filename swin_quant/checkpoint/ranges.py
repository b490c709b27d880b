"""The ranges (`<node>._amax`) of a calibrated checkpoint: docs/reference, section 1.3.

FasterTransformer's files hold one 0-dim float32 per node; a [1] is the same. A weight may have one per output channel:
[out, 1], for a convolution [out, 1, 1, 1]. Our files add `<node>._bounds`, float32 [2], for every activation: both
ends, for grids with a zero point. FasterTransformer's loaders are not strict and ignore it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.progress import log
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes

SUFFIX, BOUNDS = "._amax", "._bounds"


def is_range(key: str) -> bool:
    """Whether a key of a state_dict is a node's range."""
    return key.endswith((SUFFIX, BOUNDS))


def checked_ranges(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Key -> range, float32, for the nodes of `model` whose range is in `state`; all faults are one error.

    A range may be absent only where the policy leaves its node off, and the lower end where the node is symmetric. A
    range without a node is a fault, but for a captured network: an earlier version gave more of it nodes.
    """
    nodes, gone, is_captured = named_nodes(model), [], hasattr(model, "products")
    stored = {key.removesuffix(SUFFIX): value for key, value in state.items() if key.endswith(SUFFIX)}
    ends = {key.removesuffix(BOUNDS): value for key, value in state.items() if key.endswith(BOUNDS)}
    faults: dict[str, list[str]] = defaultdict(list)
    on = {name: node.setting for name, node in nodes.items() if node.setting.enabled}
    faults["missing"] = [name for name in on if name not in stored]
    without = [name for name, setting in on.items() if not setting.symmetric and name not in ends]
    faults["without the lower end that a zero point needs (_bounds)"] = without
    ranges: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name not in nodes and is_captured:
            gone.append(name)
            continue
        if name not in nodes:
            faults["of no node of this model"].append(name)
            continue
        if fault := _fault(value, _rows(model, name, nodes[name])):
            faults[fault].append(name)
        else:
            ranges[name + SUFFIX] = value.float().reshape(()) if value.numel() == 1 else value.float()
    for name, value in ends.items():
        if name not in nodes and is_captured:
            continue
        if name not in nodes or nodes[name].role is Role.GEMM_WEIGHT:
            faults["of no activation of this model (_bounds)"].append(name)
        elif fault := _fault_of_ends(value):
            faults[fault].append(name)
        else:
            ranges[name + BOUNDS] = value.float()
    if text := "; ".join(f"{len(names)} {fault}: {listed(names)}" for fault, names in faults.items() if names):
        raise SwinQuantError(f"{path}: its ranges (_amax) cannot be used: {text}; calibrate the model again")
    if gone:
        log.info("%s: ranges of no node of this model, left out: %s", path, listed(gone, 3))
    return ranges


def assign_ranges(model: nn.Module, ranges: Mapping[str, Tensor]) -> None:
    """Give every node its range on the model's device; a node without one forgets what it had."""
    device = next(model.parameters()).device
    on_device = {key: value.to(device) for key, value in ranges.items()}
    for name, node in named_nodes(model).items():
        node.amax, node.bounds = on_device.get(name + SUFFIX), on_device.get(name + BOUNDS)


def _rows(model: nn.Module, name: str, node: Quantizer) -> tuple[int, ...] | None:
    """The shape of a range per output channel of the weight that a weight node quantizes; None for other nodes."""
    if node.role is not Role.GEMM_WEIGHT:
        return None
    weight = model.get_parameter(f"{name.rpartition('.')[0]}.weight")
    return (len(weight), *[1] * (weight.dim() - 1))


def _fault(amax: Tensor, rows: tuple[int, ...] | None) -> str | None:
    if amax.numel() != 1 and tuple(amax.shape) != rows:
        return f"of the wrong shape {list(amax.shape)}"
    if not amax.is_floating_point():
        return f"of {amax.dtype}, not floating point"
    amax = amax.float()
    if amax.isnan().any():
        return "NaN"
    if amax.isinf().any():
        return "infinite"
    if (amax < 0).any():
        return "negative"
    return "zero" if (amax == 0).any() else None


def _fault_of_ends(ends: Tensor) -> str | None:
    if tuple(ends.shape) != (2,) or not ends.is_floating_point():
        return "not two floating point numbers (_bounds)"
    low, high = ends.float().tolist()
    return None if -math.inf < low <= 0 <= high < math.inf and low < high else "not around zero (_bounds)"
