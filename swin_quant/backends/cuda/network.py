"""A network as the engine has it: every tensor and number that the launches of its spec name."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swin_quant.backends.cuda.ft_packing import FtPacking
from swin_quant.backends.cuda.packing import Packing
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.models.layers import Swin


@dataclass(frozen=True)
class Network:
    """`tensors` and `scalars` by the names that the launches of `spec` have for them, on the CPU."""

    spec: NetworkSpec
    tensors: dict[str, Tensor] = field(repr=False)
    scalars: dict[str, float] = field(repr=False)


@torch.no_grad()
def pack(model: Swin, spec: NetworkSpec) -> Network:
    """The tensors of a calibrated model. SwinQuantError for a node without a range, and for what overflows a half."""
    packing = FtPacking(model, spec) if spec.is_ft else Packing(model, spec)
    packing.whole()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packing.tensors.items()}
    if beyond := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise SwinQuantError(f"{listed(beyond, 2)}: NaN, or beyond {spec.float_type}: the CUDA engine cannot run this")
    return Network(spec, tensors, packing.scalars)
