"""Write weights: in FasterTransformer's calibrated layout, or in Microsoft's float one."""

import io
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import atomic_write_bytes
from swin_quant.checkpoint.mindspore import encode_ckpt
from swin_quant.checkpoint.names import to_mindspore
from swin_quant.checkpoint.ranges import BOUNDS, SUFFIX, is_range
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.quantizer import named_nodes, row_ranges


def calibrated_state(model: nn.Module, by_channel: bool = False, ends: bool = True) -> "OrderedDict[str, Tensor]":
    """A bare state_dict in FasterTransformer's layout (docs/reference, sections 1.1 to 1.3), on the CPU.

    Weights and tables are float32, index buffers int64, and **every** node has its range, 0-dim float32: importers read
    them all, whichever a policy enables. Activations also keep both `ends`, which FasterTransformer does not know.
    Per-channel ranges that follow from the weight's own rows become their maximum; other ones stay [out, 1], and all
    do with `by_channel`. Raises when a node has no positive, finite range.
    """
    ranges = {name: node.amax for name, node in named_nodes(model).items()}
    unfit = [n for n, amax in ranges.items() if amax is None or not (torch.isfinite(amax) & (amax > 0)).all()]
    if unfit:
        raise SwinQuantError(f"{len(unfit)} nodes have no positive, finite range: {listed(unfit)}; calibrate the model")
    state = OrderedDict()
    rows = {} if by_channel else {f"{name}{SUFFIX}": layer.weight for name, layer in weighted_layers(model).items()}
    for key, value in model.state_dict().items():
        if key.endswith(BOUNDS) and not ends:
            continue
        derived = key in rows and value.dim() > 0 and torch.equal(row_ranges(rows[key], value.max()), value)
        state[key] = _portable(value.max() if derived else value)
    return state


def calibrated_bytes(model: nn.Module, by_channel: bool = False, ends: bool = True) -> memoryview:
    """`calibrated_state` as the content of a file: the same model gives the same bytes."""
    return _serialised(calibrated_state(model, by_channel, ends))


def save_calibrated(
    model: nn.Module, path: str | os.PathLike[str], by_channel: bool = False, ends: bool = True
) -> None:
    """Write `calibrated_state(model, by_channel, ends)` to `path`, atomically."""
    atomic_write_bytes(path, calibrated_bytes(model, by_channel, ends))


def save_float(model: nn.Module, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> None:
    """Write the weights without ranges to `path`, atomically; parameters as `dtype`, buffers unchanged.

    Buffers are tables that follow from the geometry: V2's biases would change if its coordinates were rounded to half.
    The name decides the format: .safetensors, .ckpt (MindSpore's, under mindcv's names), or else Microsoft's `{'model':
    state_dict}`. Raises when a weight overflows `dtype`.
    """
    state = OrderedDict()
    parameters = dict(model.named_parameters())
    for key, value in model.state_dict().items():
        if not is_range(key):
            state[key] = value = _portable(value, dtype if key in parameters else value.dtype)
            if not value.isfinite().all():
                raise SwinQuantError(f"{path}: {key} does not fit into {dtype}: write another type")
    if Path(path).suffix == ".safetensors":
        atomic_write_bytes(path, safetensors.torch.save(state))
    elif Path(path).suffix == ".ckpt":
        atomic_write_bytes(path, encode_ckpt(to_mindspore(state)))
    else:
        atomic_write_bytes(path, _serialised({"model": state}))


def _portable(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    value = value.detach().cpu().contiguous()
    return value.to(dtype) if value.is_floating_point() else value


def _serialised(content: Any) -> memoryview:
    # Serialised in memory first: a full disk then stops one plain write, never torch in the middle of an archive.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()
