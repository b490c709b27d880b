"""Count the cost of each call: multiplications with additions (MACs), bytes that move, parameters that are read.

Counting happens where torch hands work to a kernel, so the parts of every function are seen: attention counts as its
products, and a view costs nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swin_quant.operators.names import tensors_in


def _product(a: Tensor, b: Tensor) -> int:
    """[..., n, k] times [..., k, m]."""
    return math.prod(a.shape) * (b.shape[-1] if b.dim() > 1 else 1)


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    weight, transposed = args[1], args[6]
    side = args[0] if transposed else out  # each of its places is multiplied by one kernel
    return math.prod(side.shape[2:]) * side.shape[0] * weight.numel()


def _attention(args: Sequence[Any], out: Tensor) -> int:
    q, k, v = args[:3]
    return math.prod(q.shape) * k.shape[-2] + math.prod(q.shape[:-1]) * math.prod(v.shape[-2:])


_MACS: Mapping[str, Callable[[Sequence[Any], Tensor], int]] = {
    "mm": lambda args, out: _product(args[0], args[1]),
    "bmm": lambda args, out: _product(args[0], args[1]),
    "mv": lambda args, out: _product(args[0], args[1]),
    "matmul": lambda args, out: _product(args[0], args[1]),
    "addmm": lambda args, out: _product(args[1], args[2]),
    "addmv": lambda args, out: _product(args[1], args[2]),
    "baddbmm": lambda args, out: _product(args[1], args[2]),
    "linear": lambda args, out: math.prod(args[0].shape) * args[1].shape[0],
    "convolution": _convolution,
}


def macs_of(name: str, args: Sequence[Any], out: Any) -> int:
    """MACs of an ATen operator by its name without overload; 0 for what multiplies no matrices."""
    if name.startswith("_scaled_dot_product"):
        return _attention(args, out)
    return _MACS[name](args, out) if name in _MACS else 0


def place(tensor: Tensor) -> int:
    """The memory that a tensor lies in, as a number: views share it."""
    return tensor.untyped_storage()._cdata


def size(tensor: Tensor) -> int:
    """Bytes that reading it touches: an expanded tensor has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class CostCounter(TorchDispatchMode):
    """Adds up what runs inside: `macs`, bytes of `activations` and `weights` that move, `parameters` that are read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._held = {place(p): p.numel() for p in model.parameters()}
        self.reset()

    def reset(self) -> None:
        self.macs = self.activations = self.weights = 0
        self._read: set[int] = set()

    @property
    def parameters(self) -> int:
        """Elements of the parameters that were read since `reset`, each once."""
        return sum(self._held[key] for key in self._read)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {id(tensor): tensor for tensor in tensors_in([list(args), kwargs or {}])}.values()
        outputs = tensors_in([out])
        where = {place(tensor) for tensor in inputs}
        if not func._schema.is_mutable and all(place(tensor) in where for tensor in outputs):
            return out  # a view
        self.macs += macs_of(func.overloadpacket.__name__, args, out)
        for tensor in inputs:
            if place(tensor) in self._held:
                self.weights += size(tensor)
                self._read.add(place(tensor))
            else:
                self.activations += size(tensor)
        self.activations += sum(map(size, outputs))
        return out
