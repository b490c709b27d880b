"""One name for an operator that torch offers in several ways: `x + y`, `torch.add(x, y)` and `x.add_(y)` are `add`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
