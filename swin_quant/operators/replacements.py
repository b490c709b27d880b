"""Replacements: the same values by other operators, for a compiler that lacks one, without changing code or weights.

Each is a pure function with the arguments of the torch function that it replaces; NotImplemented leaves a call as it
is. Replacements that only move data, and products with ones and zeros, are bit-exact; the rest (means, and a linear for
each of q, k and v) agree up to float32 rounding.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from swin_quant.base.errors import UsageError, offered
from swin_quant.base.progress import log
from swin_quant.operators.plugins import Plugging
from swin_quant.operators.trace import operator_name, tensors_in

_ORDERS = {  # the four neighbours of a patch, in the order of concatenation -> the permutation that joins them
    ((0, 0), (1, 0), (0, 1), (1, 1)): (0, 1, 3, 4, 2, 5),
    ((0, 0), (0, 1), (1, 0), (1, 1)): (0, 1, 3, 2, 4, 5),
}


def pool_by_mean(x: Tensor, output_size: int | Sequence[int | None], dims: int) -> Any:
    """adaptive_avg_pool of the last `dims` dimensions, if all outputs are means of equally many inputs."""
    sizes: list[Any] = list(output_size) if isinstance(output_size, (list, tuple)) else [output_size]
    sizes = sizes if len(sizes) == dims else sizes * dims
    if all(size == 1 for size in sizes):
        return x.mean(tuple(range(-dims, 0)), keepdim=True)
    lengths = x.shape[-dims:]
    sizes = [size or length for size, length in zip(sizes, lengths, strict=True)]
    if any(length % size for size, length in zip(sizes, lengths, strict=True)):
        return NotImplemented
    parts = [part for size, length in zip(sizes, lengths, strict=True) for part in (size, length // size)]
    return x.reshape(*x.shape[:-dims], *parts).mean(tuple(range(1 - 2 * dims, 0, 2)))


def roll_by_slices(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Any:
    """roll along named dimensions, as two slices and a concatenation for each."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    if dims is None or dims == ():
        return NotImplemented  # it rolls the flattened tensor, which no Swin does
    for shift, dim in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True):
        length = x.shape[dim]
        cut = -shift % length
        if cut:
            x = torch.cat([x.narrow(dim, cut, length - cut), x.narrow(dim, 0, cut)], dim)
    return x


def unbind_by_split(x: Tensor, dim: int = 0) -> Any:
    """unbind, for instance of q, k and v, as a split and reshapes, without an index."""
    dim %= x.dim()
    shape = [*x.shape[:dim], *x.shape[dim + 1 :]]
    return tuple(part.reshape(shape) for part in x.split(1, dim))


def select_by_narrow(x: Tensor, *index: Any) -> Any:
    """`x[i]` in the first dimension, as q, k and v are taken from qkv, by a slice and a reshape."""
    if len(index) != 1 or type(index[0]) is not int or x.dim() < 2:
        return NotImplemented
    return x.narrow(0, index[0] % x.shape[0], 1).reshape(x.shape[1:])


def linear_in_three(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear with 3C outputs and C inputs, such as qkv, as three linears; weight [3C, C]."""
    if weight.dim() != 2 or weight.shape[0] != 3 * weight.shape[1]:
        return NotImplemented
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    parts = [torch.nn.functional.linear(x, part, own) for part, own in zip(weight.chunk(3), biases, strict=True)]
    return torch.cat(parts, -1)


def matmul_in_three(x: Tensor, weight: Tensor) -> Any:
    """The same for a product whose second factor is the weight [C, 3C], as in exported graphs."""
    if weight.dim() != 2 or weight.shape[1] != 3 * weight.shape[0]:
        return NotImplemented
    return torch.cat([x @ part for part in weight.chunk(3, dim=1)], -1)


def index_by_one_hot(table: Tensor, index: Any) -> Any:
    """`table[index]`, table float [N, ...], as the product of a one-hot matrix [..., N] and the table."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or not table.is_floating_point():
        return NotImplemented
    rows = torch.arange(table.shape[0], device=index.device, dtype=index.dtype)
    chosen = (index.unsqueeze(-1) == rows).to(table.dtype)
    return (chosen @ table.reshape(table.shape[0], -1)).reshape(*index.shape, *table.shape[1:])


def flatten_by_reshape(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """flatten, for x of at least one dimension."""
    if x.dim() == 0:
        return NotImplemented
    start, end = start_dim % x.dim(), end_dim % x.dim()
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def squeeze_by_reshape(x: Tensor, dim: int | Sequence[int] | None = None) -> Any:
    """squeeze."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % x.dim() for d in dims if x.shape[d] == 1} if x.dim() else set()
    return x.reshape([length for place, length in enumerate(x.shape) if place not in gone])


def unsqueeze_by_reshape(x: Tensor, dim: int) -> Any:
    """unsqueeze."""
    shape = list(x.shape)
    shape.insert(dim % (x.dim() + 1), 1)
    return x.reshape(shape)


@dataclass(frozen=True)
class Replacement:
    """`by`: replacing function by operator name; `what`: the change, in words."""

    by: dict[str, Callable[..., Any]]
    what: str


REPLACEMENTS: dict[str, Replacement] = {
    "pool1d": Replacement({"adaptive_avg_pool1d": partial(pool_by_mean, dims=1)}, "AdaptiveAvgPool1d -> mean"),
    "pool2d": Replacement({"adaptive_avg_pool2d": partial(pool_by_mean, dims=2)}, "AdaptiveAvgPool2d -> mean"),
    "roll": Replacement({"roll": roll_by_slices}, "roll -> slice + concat"),
    "qkv_split": Replacement(
        {"unbind": unbind_by_split, "select": select_by_narrow}, "q, k, v by split + reshape, without an index"
    ),
    "qkv_linears": Replacement(
        {"linear": linear_in_three, "matmul": matmul_in_three}, "qkv linear -> a linear each for q, k, v"
    ),
    "patch_merging": Replacement({}, "strided slices + concat -> reshape + transpose"),
    "gather": Replacement({"index": index_by_one_hot}, "table[index] -> one-hot product"),
    "reshape": Replacement(
        {"flatten": flatten_by_reshape, "squeeze": squeeze_by_reshape, "unsqueeze": unsqueeze_by_reshape},
        "flatten, squeeze, unsqueeze -> reshape",
    ),
}  # fmt: skip


def chosen(names: Sequence[str]) -> dict[str, Replacement]:
    """The replacements with these names. UsageError for an unknown name, or one named twice."""
    for name in names:
        if name not in REPLACEMENTS:
            raise UsageError(f"‹replace› {name!r:.60}{offered(name, REPLACEMENTS)}")
        if list(names).count(name) > 1:
            raise UsageError(f"‹replace› {name}: is named twice")
    return {name: REPLACEMENTS[name] for name in names}


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
