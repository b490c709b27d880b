"""A network as the engine runs it: its spec with every tensor and scalar that the launches name."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swin_quant.backends.cuda.ft_packing import FtPacking
from swin_quant.backends.cuda.packing import Packing
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.layers import Swin


@dataclass(frozen=True)
class Network:
    """`tensors`, on the CPU, and `scalars`, by the names that the launches of `spec` use.

    `preprocess`: how a network that takes pixels normalises them.
    """

    spec: NetworkSpec
    tensors: dict[str, Tensor] = field(repr=False)
    scalars: dict[str, float] = field(repr=False)
    preprocess: Preprocess | None = None


@torch.no_grad()
def pack(model: Swin, spec: NetworkSpec, preprocess: Preprocess | None = None) -> Network:
    """The network of a calibrated model. `preprocess`, for a spec that takes pixels, is folded into the weights.

    SwinQuantError for a node without a range, and for values that overflow half precision.
    """
    packing = FtPacking(model, spec) if spec.is_ft else Packing(model, spec, preprocess)
    packing.whole()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packing.tensors.items()}
    if beyond := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise SwinQuantError(f"{listed(beyond, 2)}: NaN, or beyond {spec.float_type}: the CUDA engine cannot run this")
    return Network(spec, tensors, packing.scalars, preprocess)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any type holds neither NaN nor Inf; torch's isfinite does not take float8."""
    return bool(tensor.float().isfinite().all() if tensor.is_floating_point() else True)
