"""What tests of passes that learn ask of a piece of work and of what is kept of one."""

import pytest
import torch

from swin_quant.quant.check import distance
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.passes.state import state_of
from swin_quant.quant.policy import dequantize, quantize


def sqnr(piece, images):
    """dB of the logits of the quantized network against the original one."""
    quantize(piece.model)
    with torch.inference_mode():
        found, expected = piece.model(images), piece.original(images)
    dequantize(piece.model)
    return distance(found, expected)[1]


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items()) and one.keys() == other.keys()


class CutOff:
    """A function that is interrupted when it is called once more than `after` times; with None it is not."""

    def __init__(self, function, after):
        self.function, self.after, self.calls = function, after, 0

    def __call__(self, *given):
        if self.calls == self.after:
            raise KeyboardInterrupt
        self.calls += 1
        return self.function(*given)


def assert_goes_on(kind, step, pieced, options, folder, monkeypatch):
    """A pass, the module `kind`, that was cut off at its third unit, whose work is the function `step`, goes on there
    and gives the same bits. `pieced(scratch=...)` makes the same piece of work each time."""
    whole = pieced()
    note = kind.run(whole, options)
    work = CutOff(getattr(kind, step), 2)
    monkeypatch.setattr(kind, step, work)
    with pytest.raises(KeyboardInterrupt):
        kind.run(pieced(scratch=Scratch(folder)), options)
    work.after = None
    piece = pieced(scratch=Scratch(folder))
    assert kind.run(piece, options) == note
    assert same(state_of(piece.model), state_of(whole.model)) and work.calls == len(piece.units)
