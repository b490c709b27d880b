"""Fake quantization for training: the op's values to the bit, with a gradient.

The gradient of x is 1 from `lowest_inside` to amax, 0 outside (pytorch-quantization's clipped straight-through
estimator). That of amax is LSQ's: dy/dscale is level - x / scale inside, and the saturated level outside.

On a CPU the elementwise steps run over blocks that stay in the cache. The backward pass keeps the positions where `x`
saturated, a few in ten thousand, instead of `x` or a mask; for a learned range also the rounding error, in a byte.
"""

import functools
import math
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from swin_quant.quant.fake_quant import (
    E4M3,
    TINY_AMAX,
    fake_quant,
    is_symmetric,
    lowest_inside,
    quantize_dequantize,
    round_to_grid_,
)

Block: TypeAlias = slice | tuple[()]
_BLOCK = 1 << 16  # values a thread: 256 KiB of float32 fit into the second-level cache beside their results
_MOST = 126  # code of the largest rounding error, half of a grid's largest step; 127 and -127: saturated


def simulate(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """`fake_quant(x, amax, qmin, qmax)`: the op itself in a graph, else its arithmetic with a cheaper backward pass.

    The op's first call imports torch's compiler, which takes seconds.
    """
    learning = torch.is_grad_enabled() and (x.requires_grad or amax.requires_grad)
    if torch.compiler.is_exporting() or x.is_meta:
        return fake_quant(x, amax, qmin, qmax)
    if not learning:
        return (fake_quant if torch.compiler.is_compiling() else quantize_dequantize)(x, amax, qmin, qmax)
    if torch.compiler.is_compiling():
        return _traced(x, amax, qmin, qmax)
    return _Eager.apply(x, amax, qmin, qmax)  # type: ignore[no-untyped-call]  # torch gives it no types


def _traced(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """Plain operations, which a compiler fuses with their neighbours and recomputes at will.

    Gradients enter by terms that are zero, t - t.detach(). `inside` is a float made without a comparison: compilers
    keep a comparison's bits for the backward pass, and inductor takes ten times as long to store them.
    """
    still, fixed = x.detach(), amax.detach()
    low = lowest_inside(fixed, qmin, qmax)
    inside = (torch.sign(fixed - still.float()) + 1).clamp(max=1) * (torch.sign(still.float() - low) + 1).clamp(max=1)
    y = quantize_dequantize(still, fixed, qmin, qmax) + inside.to(x.dtype) * (x - still)
    if amax.requires_grad:
        position = still.float() / torch.where(fixed > TINY_AMAX, fixed / qmax, torch.inf)
        slope = round_to_grid_(position.clone(), qmin, qmax) - position * inside
        y = y + (slope * _lsq_scale(x.numel(), amax.shape, qmax) * (amax - fixed)).to(y.dtype)
    return y


def _lsq_scale(values: int, shape: torch.Size, qmax: int) -> float:
    """dscale/damax times LSQ's gradient scale, 1 / sqrt(values of a range * qmax), so that ranges move as weights do.

    Esser et al., "Learned Step Size Quantization", 2020, section 2.2.
    """
    return 1 / (qmax * math.sqrt(max(values, 1) / max(math.prod(shape), 1) * qmax))


class _Eager(torch.autograd.Function):
    """Keeps the saturated positions and, if the range is learned, dy/dscale in int8: to a 504th of the largest step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
        learned = ctx.needs_input_grad[1]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        codes = torch.empty(x.shape, dtype=torch.int8, device=x.device) if learned else None
        scale = torch.where(amax > TINY_AMAX, amax / qmax, torch.inf)
        factor = torch.where(amax > TINY_AMAX, scale, 0.0)
        low = None if is_symmetric(qmin, qmax) else lowest_inside(amax, qmin, qmax)
        blocks, saturated = _blocks(x, amax.dim()), []
        buffers = [torch.empty(x[blocks[0]].shape, dtype=torch.float32, device=x.device) for _ in range(2)]
        for block in blocks:
            part = x[block]
            levels, other = buffers if block == () else (buffer[: len(part)] for buffer in buffers)
            values = part if part.dtype == torch.float32 else other.copy_(part)
            torch.div(values, scale, out=levels)
            saturated.append(outside := _outside(values, low, amax, other))
            if learned:
                unrounded = _zero(other.copy_(levels), outside)
            round_to_grid_(levels, qmin, qmax)
            if codes is not None:
                slope = torch.sub(levels, unrounded, out=other)
                codes[block].copy_(slope.mul_(_codes(qmin, qmax)).round_().clamp_(-127, 127))
            if y.dtype == torch.float32:
                torch.mul(levels, factor, out=y[block])
            else:  # one product that also converts takes several times as long as both steps
                y[block].copy_(levels.mul_(factor))
        ctx.save_for_backward(codes, *saturated)
        ctx.amax_shape, ctx.grid = amax.shape, (qmin, qmax)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        codes, *saturated = ctx.saved_tensors
        x_gradient: Tensor | None = None
        amax_gradient: Tensor | None = None
        blocks = _blocks(gradient, len(ctx.amax_shape))
        if ctx.needs_input_grad[0]:
            x_gradient = torch.clone(gradient, memory_format=torch.contiguous_format)
            for place, outside in zip(blocks, saturated, strict=True):
                _zero(x_gradient[place], outside)
        if ctx.needs_input_grad[1]:
            parts = []
            for place, outside in zip(blocks, saturated, strict=True):
                part, slope = gradient[place].float(), _slopes(codes[place], outside, *ctx.grid)
                if ctx.amax_shape:
                    parts.append((part * slope).sum_to_size(ctx.amax_shape))
                else:
                    parts.append(torch.dot(part.reshape(-1), slope.reshape(-1)))
            factor = _lsq_scale(gradient.numel(), ctx.amax_shape, ctx.grid[1]) / _codes(*ctx.grid)
            amax_gradient = functools.reduce(torch.add, parts) * factor
        return x_gradient, amax_gradient, None, None


def _blocks(x: Tensor, range_dim: int) -> list[Block]:
    """Blocks along the first dimension of x on a CPU; one block elsewhere, or with a range per channel."""
    block = _BLOCK * torch.get_num_threads()
    if range_dim or not _is_real(x) or x.numel() <= block:
        return [()]
    rows = max(1, block * len(x) // x.numel())
    return [slice(start, start + rows) for start in range(0, len(x), rows)]


def _is_real(x: Tensor) -> bool:
    """Whether x has values in this machine's memory."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def _outside(values: Tensor, low: Tensor | None, amax: Tensor, room: Tensor) -> Tensor:
    """Positions of values < low (None: -amax) or > amax: flat int64 [few] on a CPU; elsewhere a mask, without a wait.

    `room`: a work tensor like `values`. numpy must not see `values` itself: a storage that numpy has seen cannot be
    freed, but a sharded weight's must be.
    """
    seen = torch.abs(values, out=room) if low is None else room.copy_(values)
    if not _is_real(values):
        return seen > amax if low is None else (seen > amax) | (seen < low)
    beyond = seen.numpy() > amax.numpy()
    if low is not None:
        beyond |= seen.numpy() < low.numpy()
    return torch.from_numpy(np.flatnonzero(beyond))  # torch's own takes five times as long


def _zero(values: Tensor, outside: Tensor) -> Tensor:
    """Set `values` (contiguous) to 0 at the positions from `_outside`."""
    if outside.dtype == torch.bool:
        return values.masked_fill_(outside, 0)
    values.view(-1).index_fill_(0, outside, 0)
    return values


def _slopes(codes: Tensor, outside: Tensor, qmin: int, qmax: int) -> Tensor:
    """dy/dscale in float32 from codes: the rounding error, or the saturated level at positions `outside`."""
    slopes, steps, one = codes.float(), qmax - qmin, _codes(qmin, qmax)
    if outside.dtype == torch.bool:
        return torch.where(outside, one * (slopes * steps).clamp_(qmin, qmax), slopes)
    flat = slopes.view(-1)
    return flat.index_copy_(0, outside, one * (flat[outside] * steps).clamp_(qmin, qmax)).view_as(slopes)


def _codes(qmin: int, qmax: int) -> float:
    """Codes a level; two levels of E4M3 are at most 32 apart."""
    return 2 * _MOST / (32 if (qmin, qmax) == E4M3 else 1)
