"""Checks for passes that learn."""

from dataclasses import dataclass

import torch

from swin_quant.quant.passes import Pass
from swin_quant.quant.policy import quantizing


@dataclass(frozen=True)
class Step:
    """A step of a recipe whose pass is not one of ours."""

    kind: Pass
    name: str = "own"
    options: None = None

    def to_dict(self):
        return {"name": self.name}


def logits(model, images):
    """The logits of a quantized network."""
    with quantizing(model), torch.inference_mode():
        return model(images)


def decibels(found, expected):
    """SQNR of `found`, in dB."""
    found, expected = found.double(), expected.double()
    return 10 * torch.log10(expected.square().sum() / (found - expected).square().sum()).item()


def sqnr(context, images):
    """dB of the quantized network's logits against the original's."""
    with torch.inference_mode():
        expected = context.original(images)
    return decibels(logits(context.model, images), expected)


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items()) and one.keys() == other.keys()
