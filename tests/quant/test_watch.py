"""Watching: the named modules' inputs and outputs are seen, and nothing stays behind."""

import pytest
import torch
from torch import nn

from swin_quant.quant.watch import watching


def test_each_forward_of_a_named_module_is_seen_until_the_end():
    model, seen = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), []
    with watching({"first": model[0]}, lambda name, module, inputs, output: seen.append((name, inputs[0], output))):
        x = torch.randn(4, 3)
        assert torch.equal(model(x), model[1](model[0](x)))
    model(x)
    assert [name for name, _, _ in seen] == ["first", "first"]
    assert torch.equal(seen[0][1], x) and torch.equal(seen[0][2], nn.functional.linear(x, *model[0].parameters()))


def test_a_visitor_s_result_is_ignored_and_its_exception_ends_the_forward():
    model = nn.Linear(3, 2)

    def stop(*_):
        raise RuntimeError("seen enough")

    with watching({"": model}, lambda *_: torch.zeros(1)):
        assert model(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(RuntimeError, match="seen enough"), watching({"": model}, stop):
        model(torch.ones(1, 3))
    assert not model._forward_hooks
