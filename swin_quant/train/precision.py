"""Numeric precision of training: apex's levels O0 to O3, on torch.amp.

O0: everything in float32. O1: autocast; matrix products in half, and weights, norms, softmax and residual stream in
float32. O2: the network computes in half, and the optimizer updates float32 master weights; Swin's layer norms keep
float32 weights. O3: weights are half during steps, those of layer norms too, and float32 between epochs and at the end.
Norms, softmax and fake quantization compute in float32 at every level; ranges and batch norms are never half.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from swin_quant.base.progress import log
from swin_quant.quant.outputs import Output

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """A level of precision on a device; `half` is its half-precision type."""

    level: str
    half: torch.dtype
    device: torch.device

    @classmethod
    def choose(cls, level: str, half: str, device: torch.device) -> "Precision":
        """`half` auto is bfloat16, or float16 on a GPU without bfloat16."""
        automatic = "float16" if device.type == "cuda" and not torch.cuda.is_bf16_supported() else "bfloat16"
        chosen = automatic if half == "auto" else half
        slow = device.type == "cpu" and chosen == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if slow and level != "O0":
            log.warning("this CPU has no bfloat16 arithmetic, so %s is emulated: O0 is faster", level)
        return cls(level, TYPES[chosen], device)

    def network(self, model: nn.Module) -> nn.Module:
        """The network that computes the logits with the parameters that the optimizer updates."""
        if self.level == "O3":
            _cast(model, self.half)
        return self.view(model)

    @contextmanager
    def between_steps(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, `model` has float32 weights, for averages and calibration.

        They are copies: a parameter that changed its type would lose the hooks that sum gradients over ranks.
        """
        every = dict(model.named_parameters(remove_duplicate=False)) if self.level == "O3" else {}
        halves = {name: parameter for name, parameter in every.items() if parameter.dtype == self.half}
        for name, parameter in halves.items():
            _put(model, name, nn.Parameter(parameter.detach().float(), parameter.requires_grad))
        try:
            yield
        finally:
            for name, parameter in halves.items():
                _put(model, name, parameter)

    def finish(self, model: nn.Module) -> None:
        """Undo `network` at the end of training: all weights float32."""
        if self.level == "O3":
            _cast(model, torch.float32)
        for norm in _layer_norms(model).values():
            norm.follows_input = False

    def view(self, model: nn.Module) -> nn.Module:
        """The network that computes a model's logits without changing its weights."""
        return HalfCopy(model, self.half) if self.level in ("O2", "O3") else model

    def autocast(self) -> torch.autocast:
        """The context of every forward pass."""
        return torch.autocast(self.device.type, self.half, enabled=self.level == "O1")

    def scaler(self) -> torch.amp.GradScaler:
        """A loss scaler, active only for float16 gradients of float32 weights."""
        return torch.amp.GradScaler(
            self.device.type, enabled=self.half == torch.float16 and self.level in ("O1", "O2"), init_scale=2.0**14
        )

    def logits(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """The float32 logits of images [B, 3, H, W]."""
        (logits,) = self.outputs(network, images)
        return logits

    def outputs(self, network: Callable[[Tensor], Output], images: Tensor) -> list[Tensor]:
        """The float32 outputs of a network for images [B, 3, H, W]: one tensor, or a list of maps."""
        if self.level in ("O2", "O3"):
            images = images.to(self.half)
        with self.autocast():
            outputs = network(images)
            return [part.float() for part in ([outputs] if isinstance(outputs, Tensor) else outputs)]


class HalfCopy(nn.Module):
    """Calls a float32 model with half-precision copies of its weights; gradients reach the float32 weights."""

    def __init__(self, model: nn.Module, half: torch.dtype) -> None:
        super().__init__()
        norms = _layer_norms(model)
        for norm in norms.values():
            norm.follows_input = True
        self.model, self.dtype, self.norms = model, half, _batch_norms(model) | set(norms)

    def forward(self, images: Tensor) -> Tensor:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        copies = {name: tensor.to(self.dtype) for name, tensor in tensors if _computes(name, tensor, self.norms)}
        return functional_call(self.model, copies, (images,))


def _cast(model: nn.Module, to: torch.dtype) -> None:
    """Cast parameters in place, since the optimizer holds them."""
    norms = _batch_norms(model)
    for name, parameter in model.named_parameters():
        if _computes(name, parameter, norms):
            parameter.data = parameter.data.to(to)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, parameter)


def _batch_norms(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}


def _layer_norms(model: nn.Module) -> dict[str, Any]:
    """The norms whose weights may have another type than the network, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "follows_input")}


def _computes(name: str, tensor: Tensor, norms: set[str]) -> bool:
    """Whether a half network casts a tensor: not ranges, norms' weights, nor a batch norm's statistics, which a copy
    would not update."""
    kept = name.endswith(("_amax", "_bounds")) or name.rpartition(".")[0] in norms
    return tensor.is_floating_point() and not kept
