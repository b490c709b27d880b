"""One node: a named place in a network where a tensor may be observed or quantized.

A quantizer is in one state: OFF passes its input through, CALIBRATE also shows it to an observer, QUANTIZE rounds it to
the grid of its range. Ranges are never dynamic: quantizing a node that was not calibrated raises an error with its
name. The buffer `_amax` has pytorch-quantization's name and meaning, so that a calibrated checkpoint is
FasterTransformer's (docs/reference, sections 1.3 and 1.6). `_bounds` is our own: both ends of the range, for a zero
point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.fake_quant import FORMATS, FP8, TINY_AMAX, grid, grid_between
from swin_quant.quant.straight_through import simulate

_LEAST = 1e-3  # width of a learned range, relative to its start
Observer = Callable[[Tensor], None]
NO_RANGE = "node {} has no range (amax): calibrate the model before quantizing it"
NO_BOUNDS = "node {} has no lower end (bounds): calibrate the model again for zero points"


class State(Enum):
    """Pass a tensor through, show it to an observer, or quantize it."""

    OFF = "off"
    CALIBRATE = "calibrate"
    QUANTIZE = "quantize"


class Role(str, Enum):
    """A node's place in a network; architectures declare it, policies select by it."""

    GEMM_INPUT = "gemm_input"
    ONE_SIDED_INPUT = "one_sided_input"  # a GEMM's input after GELU or ReLU: half of a symmetric grid is idle
    GEMM_WEIGHT = "gemm_weight"
    GEMM_OUTPUT = "gemm_output"
    MATMUL_INPUT = "matmul_input"
    SOFTMAX_OUTPUT = "softmax_output"  # a matmul's input: from 0 to 1, whatever the pictures
    NORMALIZE_INPUT = "normalize_input"
    SOFTMAX_INPUT = "softmax_input"
    NORM_INPUT = "norm_input"
    RESIDUAL = "residual"
    CONV_OUTPUT = "conv_output"  # with its bias, if a reader has no own node: some engines need a pair


@dataclass(frozen=True)
class Setting:
    """A policy's decision for one node.

    `block`: the number of values in a row of a weight [out, in] that share a range; None: the whole row. `amax`: a
    fixed range instead of the calibrated one.
    """

    enabled: bool = False
    bits: int = 8
    granularity: str = "per-tensor"
    block: int | None = None
    narrow_range: bool = False
    symmetric: bool = True
    format: str = FORMATS[0]
    amax: float | None = None

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a weight has a range."""
        return self.granularity == "per-channel"

    @property
    def levels(self) -> tuple[int, int]:
        """Smallest and largest level of the format and bits, without a zero point."""
        return grid(self.bits, self.narrow_range, self.format)

    @property
    def kind(self) -> str:
        """The type of the levels: `int8`, `int4`, `fp8`."""
        return FP8 if self.format == FP8 else f"int{self.bits}"


class Quantizer(nn.Module):
    """A node. `setting` is the policy's decision, `state` its present action: calibration observes every node, and only
    then a policy chooses.

    `amax` is None until calibrated, then float32: 0-dim, or [channels, 1, ...] per channel. `bounds` are the two ends
    for a grid with a zero point: float32 [2], low <= 0 <= high; None if they were not recorded. Calibration and QAT set
    both, no policy does: the setting says which of them is the `range`, and `range_for` derives the range in effect.
    """

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role
        self.batch_dim = 0  # the tensor's dimension of pictures
        self.name = "(unnamed node)"
        self.state = State.OFF
        self.setting = Setting()
        self.observer: Observer | None = None
        self._least: Tensor  # width of a learned range
        self._amax: Tensor | None
        self._bounds: Tensor | None
        self.register_buffer("_amax", None)
        self.register_buffer("_bounds", None)
        self._ends: tuple[float, ...] | None = None  # bounds as numbers, so that a grid does not wait for a device

    @property
    def amax(self) -> Tensor | None:
        """The calibrated clipping range: larger values saturate. scale = amax / largest level, 127 or 448."""
        return self._amax

    @amax.setter
    def amax(self, value: Tensor | float | None) -> None:
        self._set("_amax", value)

    @property
    def bounds(self) -> Tensor | None:
        """The calibrated lower and upper end, float32 [2], for a grid with a zero point."""
        return self._bounds

    @bounds.setter
    def bounds(self, value: Tensor | Sequence[float] | None) -> None:
        self._set("_bounds", value)
        self._ends = None if self._bounds is None else tuple(self._bounds.tolist())

    def _set(self, key: str, value: Any) -> None:
        if value is not None:
            with torch.inference_mode(False):  # a range set while scoring may be trained later
                value = torch.as_tensor(value, dtype=torch.float32).detach().clone()
        held = getattr(self, key)
        if isinstance(held, nn.Parameter) and value is not None and value.shape == held.shape:
            held.data = value  # an optimizer holds the parameter
        else:
            delattr(self, key)
            self.register_buffer(key, value)

    @property
    def range(self) -> Tensor:
        """The range of the grid, which QAT learns: `bounds` for a zero point, else `amax`, which a policy may have
        fixed. SwinQuantError if it was never calibrated."""
        found = self._amax if self.setting.symmetric else self._bounds
        if found is None:
            raise SwinQuantError((NO_RANGE if self.setting.symmetric else NO_BOUNDS).format(self.name))
        if self.setting.amax is not None:
            return torch.full((), self.setting.amax, dtype=torch.float32, device=found.device)
        return found

    @property
    def grid(self) -> tuple[int, int]:
        """Smallest and largest level; unless the setting is symmetric, of the unsigned grid with zero point -qmin."""
        qmin, qmax = self.setting.levels
        if self.setting.symmetric:
            return qmin, qmax
        if self._ends is None:
            raise SwinQuantError(NO_BOUNDS.format(self.name))
        low, high = self._ends
        return grid_between(low, high, qmax - qmin)

    def range_for(self, x: Tensor | None = None) -> Tensor:
        """The range in effect for `x` [channels, ...] at the node's granularity: 0-dim, or [channels, 1, ...].

        None: for a whole tensor, 0-dim. A range per tensor is reduced to each channel's own (`row_ranges`); of ranges
        per channel, a tensor takes the largest. In blocks [channels, in], each value has its block's range. With a zero
        point: the grid's upper end.
        """
        if not self.setting.symmetric:
            (low, high), (qmin, qmax) = self.range.unbind(), self.grid
            return (high - low) * (qmax / (qmax - qmin))  # qmax steps, each the same share of the width
        amax = self.range
        if x is None:
            return amax.max()
        if block := self.setting.block:
            if x.dim() != 2 or x.shape[1] % block:
                shape = " x ".join(map(str, x.shape))
                raise SwinQuantError(f"node {self.name}: blocks of {block} do not fill the rows of a weight of {shape}")
            largest = x.detach().unflatten(1, (-1, block)).abs().amax(-1)
            return _parts(largest, amax).repeat_interleave(block, 1)
        if self.setting.per_channel == (amax.dim() > 0):
            return amax
        return row_ranges(x, amax) if self.setting.per_channel else amax.max()

    def learn_range(self) -> None:
        """Make the range a parameter for an optimizer, with the same key and value in a state_dict.

        Call `hold_range` after each step: with a zero point only the width is learned, and a range of zero could not
        grow again. The width is amax, or the largest of several; with a zero point, the distance between both ends.
        """
        key, value = ("_amax" if self.setting.symmetric else "_bounds"), self.range.detach().clone()
        self._least = _LEAST * (value.abs().max() if self.setting.symmetric else value.abs().sum())
        delattr(self, key)
        setattr(self, key, nn.Parameter(value))

    @torch.no_grad()
    def hold_range(self) -> None:
        """Correct a range after an optimizer's step: at least a thousandth of its start wide, the same zero point."""
        if self.setting.symmetric:
            self.range.clamp_(min=self._least)
            return
        (low, high), (qmin, qmax) = self.range.unbind(), self.grid
        levels = torch.arange(qmin, qmax + 1, qmax - qmin, device=low.device)
        self.range.copy_(torch.maximum(high - low, self._least) / (qmax - qmin) * levels)

    def freeze_range(self) -> None:
        """Make the range a buffer again."""
        for key in ("_amax", "_bounds"):
            held = getattr(self, key)
            if isinstance(held, nn.Parameter):
                delattr(self, key)
                self.register_buffer(key, None)
                setattr(self, key.removeprefix("_"), held.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Pass, observe or fake-quantize `x` (any shape), by `state`; shape and type stay."""
        if self.state is State.OFF:
            return x
        if self.state is State.CALIBRATE:
            if self.observer is not None:
                self.observer(x.movedim(self.batch_dim, 0) if self.batch_dim else x)
            return x
        return simulate(x, self.range_for(x), *self.grid)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantizer":
        # A range stays float32 in .half() and .bfloat16(): only its device follows the model.
        before = [None if held is None else held.detach() for held in (self._amax, self._bounds)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        for held, kept in zip((self._amax, self._bounds), before, strict=True):
            if held is not None and kept is not None:
                held.data = kept.to(held.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # A checkpoint creates the buffers that it holds; a [1] range, as some tools write, becomes 0-dim.
        for key in ("amax", "bounds"):
            if (value := state_dict.get(f"{prefix}_{key}")) is not None:
                setattr(self, key, value.reshape(()) if value.numel() == 1 else value)
                state_dict = {**state_dict, f"{prefix}_{key}": getattr(self, key)}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        amax = "none" if self._amax is None else f"{self._amax.max().item():.4g}"
        kind = FP8 if self.setting.format == FP8 else f"{self.setting.bits} bits"
        return f"{self.role.value}, {self.state.value}, {kind}, {self.setting.granularity}, amax={amax}"


def row_ranges(x: Tensor, amax: Tensor) -> Tensor:
    """The ranges [channels, 1, ...] of the channels of `x` [channels, ...] under a range per tensor, 0-dim.

    The largest magnitude of each channel, at most that range; the whole range for a channel of zeros.
    """
    x, rest = x.detach(), tuple(range(1, x.dim()))
    return _parts(torch.maximum(x.amax(rest, keepdim=True), -x.amin(rest, keepdim=True)), amax)  # abs() would copy x


def _parts(largest: Tensor, amax: Tensor) -> Tensor:
    """The ranges of a tensor's parts with these largest magnitudes, at most the tensor's own."""
    largest = largest.float()
    return torch.where(largest > TINY_AMAX, torch.minimum(largest, amax), amax)


def named_nodes(model: nn.Module) -> dict[str, Quantizer]:
    """Every node of a model by its dotted name, in module order; also sets each node's `name`."""
    nodes = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    for name, node in nodes.items():
        node.name = name
    return nodes
