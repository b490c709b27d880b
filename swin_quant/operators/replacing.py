"""Run any model with some operators replaced, without changing its code or weights."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.operators.names import operator_name, tensors_in
from swin_quant.operators.plugins import Plugging
from swin_quant.operators.replacements import Replacement

_ORDERS = {  # the four neighbours of a patch, in the order of concatenation -> the permutation that joins them
    ((0, 0), (1, 0), (0, 1), (1, 1)): (0, 1, 3, 4, 2, 5),
    ((0, 0), (0, 1), (1, 0), (1, 1)): (0, 1, 3, 2, 4, 5),
}


class Replacing(TorchFunctionMode):
    """Inside the context, `replacements` take over the calls of their operators; `done` counts calls by replacement.

    It works in eager runs, tracing and torch.export alike.
    """

    def __init__(self, replacements: Mapping[str, Replacement]) -> None:
        super().__init__()
        self.by = {op: (name, function) for name, one in replacements.items() for op, function in one.by.items()}
        self.merges = "patch_merging" in replacements
        self.quarters: Any = WeakIdKeyDictionary()
        self.done: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator_name(func, args)
        if op in self.by:
            name, function = self.by[op]
            out = function(*args, **kwargs)
            if out is not NotImplemented:
                self.done[name] += 1
                return out
        if self.merges and op == "cat":
            merged = self._merged(*args, **kwargs)
            if merged is not None:
                self.done["patch_merging"] += 1
                return merged
        out = func(*args, **kwargs)
        if self.merges and op == "slice" and (start := _quarter(args)):
            self.quarters[out] = (args[0], start)
        return out

    def _merged(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
        """The four quarters of one map [B, H, W, C], joined along the channels by one permutation."""
        found = [self.quarters.get(tensor) for tensor in tensors]
        if len(found) != 4 or None in found or dim not in (-1, 3):
            return None
        x = found[0][0]
        order = _ORDERS.get(tuple(start for _, start in found))
        if order is None or any(source is not x for source, _ in found) or x.shape[1] % 2 or x.shape[2] % 2:
            return None
        batch, height, width, channels = x.shape
        parts = x.reshape(batch, height // 2, 2, width // 2, 2, channels).permute(order)
        return parts.reshape(batch, height // 2, width // 2, 4 * channels)


def _quarter(args: Sequence[Any]) -> tuple[int, int] | None:
    """(r, c) of a call `x[:, r::2, c::2, :]`, x [B, H, W, C]; None for any other index."""
    x, index = args[0], args[1] if len(args) > 1 else None
    if not isinstance(index, tuple) or x.dim() != 4 or len(index) not in (3, 4):
        return None
    if any(not isinstance(part, slice) for part in index):
        return None
    whole, rows, columns, *rest = index
    if any(part != slice(None) for part in (whole, *rest)) or rows.step != 2 or columns.step != 2:
        return None
    starts = rows.start or 0, columns.start or 0
    return starts if set(starts) <= {0, 1} and rows.stop is None and columns.stop is None else None


def check_used(replacements: Sequence[str], replacing: Replacing, plugging: Plugging) -> None:
    """After a trace: UsageError for a plugin that the model never calls; a warning for an unused replacement."""
    if idle := [operator for operator in plugging.plugins if not plugging.done[operator]]:
        raise UsageError(f"‹plugin› {idle[0]}: the model never calls it: leave it out")
    for name in replacements:
        if not replacing.done[name]:
            log.warning("‹replace› %s: the model never calls it", name)


def compare(model: nn.Module, images: Tensor, replacements: Mapping[str, Replacement]) -> dict[str, tuple[int, float]]:
    """Run each replacement alone on `model`. Returns the calls that it replaced and the largest difference of the
    output."""
    found: dict[str, tuple[int, float]] = {}
    with torch.no_grad():
        wanted = tensors_in([model(images)])
        for name, replacement in replacements.items():
            with Replacing({name: replacement}) as replacing:
                out = tensors_in([model(images)])
            differences = [float((a - b).abs().max()) for a, b in zip(out, wanted, strict=True)]
            found[name] = (replacing.done[name], max(differences))
    return found
