"""Trace every operator call of a model for one batch, in order: name, module, shapes, MACs. Nothing is computed.

The model runs on torch's meta device, where tensors have shapes and no values; a module that needs a value depends on
data, and is named. An operator that torch offers in several ways has one name: `x + y`, `torch.add(x, y)` and
`x.add_(y)` are `add`. Traces on other input shapes show which shapes follow.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from swin_quant.base.errors import SwinQuantError, listed

_SAME = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "t": "transpose",
    "T": "transpose",
    "mT": "transpose",
    "view": "reshape",
    "view_as": "reshape",
    "reshape_as": "reshape",
    "movedim": "permute",
    "split_with_sizes": "split",
    "mm": "matmul",
    "bmm": "matmul",
    "max_pool2d_with_indices": "max_pool2d",
    "sum_to_size": "sum",
    "float": "to",
    "half": "to",
    "bfloat16": "to",
    "type": "to",
}
# Types, devices and memory: an engine has nothing to compute for these.
HOUSEKEEPING = frozenset({
    "contiguous", "detach", "clone", "requires_grad", "data", "cpu", "cuda", "size", "numel", "device", "type_as",
    "new_empty", "new_zeros", "zeros", "empty", "zeros_like", "ones", "ones_like", "full", "tensor", "arange",
    "set_grad_enabled", "linspace",
})  # fmt: skip
_MORE = 16  # pixels: whole patches, and no map twice as large, which could pass for a batch of two


def _product(a: Tensor, b: Tensor) -> int:
    """[..., n, k] times [..., k, m]."""
    return math.prod(a.shape) * (b.shape[-1] if b.dim() > 1 else 1)


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    weight, transposed = args[1], args[6]
    side = args[0] if transposed else out  # each position takes one whole kernel
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


def count_macs(name: str, args: Sequence[Any], out: Any) -> int:
    """MACs of an ATen operator by its name without overload; 0 if it multiplies no matrices."""
    if name.startswith("_scaled_dot_product"):
        return _attention(args, out)
    return _MACS[name](args, out) if name in _MACS else 0


class MacCounter(TorchDispatchMode):
    """Adds up the `macs` of the operators inside the context."""

    macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.macs += count_macs(func.overloadpacket.__name__, args, out)
        return out


Shape: TypeAlias = tuple[int, ...]
_NEEDS_VALUES = ("meta tensor", "Meta tensor", "'Meta' backend", "Cannot copy out of meta")


class NotTraceable(SwinQuantError):
    """A model that cannot be traced. `module`: where; `on_data`: whether it needs values."""

    def __init__(self, module: str, reason: str, on_data: bool) -> None:
        self.module, self.reason, self.on_data = module, reason, on_data
        why = "its control flow or shapes depend on data: " if on_data else ""
        super().__init__(f"the model cannot be traced: module {module or '(the model itself)'}: {why}{reason}")


@dataclass(frozen=True)
class Call:
    """One call of an operator, in the module that made it."""

    name: str
    module: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    macs: int = 0


class Recorder(TorchFunctionMode):
    """Records each function call inside the context; `stack` holds the names of the running modules."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack, self.calls = stack, list[Call]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        counter = MacCounter()  # type: ignore[no-untyped-call]  # torch gives it no types
        with counter:
            out = func(*args, **kwargs)
        inputs, outputs = tensors_in([list(args), kwargs]), tensors_in([out])
        name = operator_name(func, args)
        computes = any(all(tensor is not other for other in inputs) for tensor in outputs)  # not dropout in evaluation
        # A property such as `x.data` or `x.grad` computes nothing, except a transposition.
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__") and name != "transpose"
        if computes and name and name not in HOUSEKEEPING and not is_attribute:
            module = self.stack[-1] if self.stack else ""
            self.calls.append(Call(name, module, _shapes(inputs), _shapes(outputs), counter.macs))
        return out


def _shapes(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(map(int, tensor.shape)) for tensor in tensors)


def trace(
    model: nn.Module, images: Sequence[int], inside: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[Call]:
    """The calls of `model` in evaluation mode for pictures of shape `images`, [B, in, H, W].

    `inside` makes a context for the run. NotTraceable names the module that cannot be traced, and why.
    """
    model = on_meta(model).eval()
    stack: list[str] = []
    recorder = Recorder(stack)
    with _naming(model, stack), torch.no_grad(), torch.device("meta"), recorder, inside():
        pictures = torch.empty(tuple(images), dtype=torch.float32, device="meta")
        recorder.calls.clear()
        try:
            model(pictures)
        except SwinQuantError:
            raise
        except Exception as error:  # a user's model may raise anything
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = (lines or [type(error).__name__])[0]
            module = stack[-1] if stack else ""
            raise NotTraceable(module, reason[:300], any(words in str(error) for words in _NEEDS_VALUES)) from error
    return recorder.calls


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


@contextmanager
def _naming(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Inside the context, `stack` holds the names of the running modules, outermost first; after an error, where it
    happened."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _, __, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _pop(stack)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pop(stack: list[str]) -> None:
    stack.pop()


def operator_name(function: Callable[..., Any], args: Sequence[Any] = ()) -> str:
    """The name of a torch function or method; indexing is `slice`, `select` or, by a tensor, `index`."""
    name = getattr(function, "__name__", "").partition(".")[0]  # ATen's names include the overload
    if name == "__get__":  # a property, `x.T`
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    elif name == "__getitem__":
        return _indexing(args[1] if len(args) > 1 else None)
    if name.startswith("__"):
        name = re.sub(r"^(r|i)(?=(add|sub|mul|truediv|div|matmul|pow)$)", "", name.strip("_"))
    name = name.removesuffix("_") if not name.startswith("_") else name.strip("_")
    return _SAME.get(name, name)


def _indexing(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is None or part is Ellipsis or isinstance(part, (int, slice))) for part in parts):
        return "index"
    return "select" if any(isinstance(part, int) for part in parts) else "slice"


def tensors_in(value: Any) -> list[Any]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True)
class Variation:
    """Whether a dimension of the pictures may vary, how many operators' shapes follow it, and `why` not."""

    dimension: str
    free: bool
    calls: int
    why: str = ""


def variations(model: nn.Module, images: Sequence[int], calls: Sequence[Call]) -> list[Variation]:
    """Whether shapes follow another batch, square pictures of another size, and pictures that are not square.

    `calls`: the trace of `model` for pictures of shape `images`, [B, in, H, W].
    """
    batch, channels, height, width = images
    others = {
        "batch": (batch + 1, channels, height, width),
        "size": (batch, channels, height + _MORE, width + _MORE),
        "height alone": (batch, channels, height + _MORE, width),
    }
    return [_variation(name, model, other, calls) for name, other in others.items()]


def _variation(name: str, model: nn.Module, images: Sequence[int], calls: Sequence[Call]) -> Variation:
    try:
        found = trace(model, images)
    except NotTraceable as error:
        return Variation(name, False, 0, f"{error.module or 'the model itself'}: {error.reason}")
    if [call.name for call in found] != [call.name for call in calls]:
        return Variation(name, True, len(found), "other operators are called: control flow depends on it")
    changed = sum(a.inputs != b.inputs or a.outputs != b.outputs for a, b in zip(found, calls, strict=True))
    return Variation(name, True, changed)


def training_only(model: nn.Module) -> dict[str, list[str]]:
    """Names of modules without effect in evaluation, by kind: dropout and drop path."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) or kind.lower() in ("droppath", "stochasticdepth"):
            found.setdefault(kind, []).append(name)
    return found


def sentence(variation: Variation) -> str:
    """The variation in words."""
    if not variation.free:
        return f"{variation.dimension}: fixed; {variation.why}"
    return f"{variation.dimension}: may vary; shapes of {variation.calls} calls follow it" + (
        f"; {variation.why}" if variation.why else ""
    )


def training_sentence(found: dict[str, list[str]]) -> str:
    """The modules that only training needs, in words."""
    return "; ".join(f"{len(names)} {kind} ({listed(names, 2)})" for kind, names in found.items()) or "none"
