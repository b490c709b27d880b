"""The distance of a result from what it should be, in decibels."""

import torch


def sqnr(signal, other):
    """dB between two tensors or arrays, on any device."""
    signal, other = (torch.as_tensor(one).detach().cpu().double() for one in (signal, other))
    return float(10 * torch.log10(signal.square().sum() / (signal - other).square().sum().clamp(min=1e-30)))
