"""Checks for passes that learn: of their context, and of their stored state."""

from dataclasses import dataclass

import pytest
import torch

from swin_quant.quant.passes import Pass
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.passes.trial import copy_state
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


class CutOff:
    """A function that raises KeyboardInterrupt at call number `after` + 1; with None it never does."""

    def __init__(self, function, after):
        self.function, self.after, self.calls = function, after, 0

    def __call__(self, *given):
        if self.calls == self.after:
            raise KeyboardInterrupt
        self.calls += 1
        return self.function(*given)


def assert_goes_on(kind, step, make_context, options, folder, monkeypatch):
    """The pass in module `kind`, interrupted at its third unit (`step` does a unit's work), goes on there and gives the
    same bits. `make_context(scratch=...)` makes the same context each time."""
    whole = make_context()
    note = kind.run(whole, options)
    work = CutOff(getattr(kind, step), 2)
    monkeypatch.setattr(kind, step, work)
    with pytest.raises(KeyboardInterrupt):
        kind.run(make_context(scratch=Scratch(folder)), options)
    work.after = None
    context = make_context(scratch=Scratch(folder))
    assert kind.run(context, options) == note
    assert same(copy_state(context.model), copy_state(whole.model)) and work.calls == len(context.units)
