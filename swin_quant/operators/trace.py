"""Trace every operator call of a model for one batch, in order: name, module, shapes, MACs. Nothing is computed.

The model runs on torch's meta device, where tensors have shapes and no values; a module that needs a value depends on
data, and is named. An operator that torch offers in several ways has one name: `x + y`, `torch.add(x, y)` and
`x.add_(y)` are `add`. Traces on other input shapes show which shapes follow.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from swin_quant.base.errors import SwinQuantError

_OTHERS = {  # names of the same operator
    "div": "truediv true_divide divide",
    "mul": "multiply",
    "sub": "subtract",
    "cat": "concat concatenate",
    "transpose": "swapaxes t T mT",
    "reshape": "view view_as reshape_as",
    "permute": "movedim",
    "split": "split_with_sizes",
    "matmul": "mm bmm",
    "max_pool2d": "max_pool2d_with_indices",
    "sum": "sum_to_size",
    "to": "float half bfloat16 type",
}
_SAME = {other: name for name, others in _OTHERS.items() for other in others.split()}
# Types, devices and memory: an engine has nothing to compute for these.
HOUSEKEEPING = frozenset({
    "contiguous", "detach", "clone", "requires_grad", "data", "cpu", "cuda", "size", "numel", "device", "type_as",
    "new_empty", "new_zeros", "zeros", "empty", "zeros_like", "ones", "ones_like", "full", "tensor", "arange",
    "set_grad_enabled", "linspace",
})  # fmt: skip
_MORE = 16  # pixels: whole patches, and no map twice as large, which could pass for a batch of two


class MacCounter(TorchDispatchMode):
    """Adds up the `macs` of the operators inside the context, by torch's own formulas where it has one."""

    macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, packet = func(*args, **(kwargs or {})), func.overloadpacket
        if packet.__name__.startswith("_scaled_dot_product"):
            q, k, v = args[:3]
            self.macs += q.numel() * k.shape[-2] + math.prod(q.shape[:-1]) * math.prod(v.shape[-2:])
        elif packet.__name__ in ("mv", "addmv"):
            self.macs += args[-2].numel()
        elif packet in flop_registry:
            self.macs += flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2
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
    stack: list[str] = []  # of the running modules, outermost first; after an error, where it happened

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: stack.append(name))
        module.register_forward_hook(leave)
    recorder = Recorder(stack)
    with torch.no_grad(), torch.device("meta"), recorder, inside():
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


def operator_name(function: Callable[..., Any], args: Sequence[Any] = ()) -> str:
    """The name of a torch function or method; indexing is `slice`, `select` or, by a tensor, `index`."""
    name = getattr(function, "__name__", "").partition(".")[0]  # ATen's names include the overload
    if name == "__get__":  # a property, `x.T`
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    elif name == "__getitem__":
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(not (part is None or part is Ellipsis or isinstance(part, (int, slice))) for part in parts):
            return "index"
        return "select" if any(isinstance(part, int) for part in parts) else "slice"
    if name.startswith("__"):
        name = re.sub(r"^(r|i)(?=(add|sub|mul|truediv|div|matmul|pow)$)", "", name.strip("_"))
    name = name.removesuffix("_") if not name.startswith("_") else name.strip("_")
    return _SAME.get(name, name)


def tensors_in(value: Any) -> list[Any]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
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
    variations = []
    for name, other in others.items():
        try:
            found = trace(model, other)
        except NotTraceable as error:
            variations.append(Variation(name, False, 0, f"{error.module or 'the model itself'}: {error.reason}"))
            continue
        if [call.name for call in found] != [call.name for call in calls]:
            why = "other operators are called: control flow depends on it"
            variations.append(Variation(name, True, len(found), why))
            continue
        changed = sum(a.inputs != b.inputs or a.outputs != b.outputs for a, b in zip(found, calls, strict=True))
        variations.append(Variation(name, True, changed))
    return variations


def sentence(variation: Variation) -> str:
    """The variation in words."""
    if not variation.free:
        return f"{variation.dimension}: fixed; {variation.why}"
    return f"{variation.dimension}: may vary; shapes of {variation.calls} calls follow it" + (
        f"; {variation.why}" if variation.why else ""
    )
