"""Factors channel by channel: only where a pass made them, and as in the checkpoint."""

import pytest
import torch
from torch import nn

from swin_quant.quant.layer import ChannelFactors, made_factors
from swin_quant.quant.passes.trial import give_state, state_of


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(3, 3), ChannelFactors(3))


def test_without_a_weight_nothing_happens_and_nothing_is_stored(net):
    x = torch.randn(2, 3)
    assert torch.equal(net[1](x), x) and not made_factors(net)
    assert list(net.state_dict()) == ["0.weight", "0.bias"]


def test_with_one_channels_are_multiplied_in_the_type_of_what_is_given(net):
    net[1].give(torch.tensor([1.0, 2.0, 0.5]))
    assert made_factors(net) == ["1"]
    assert net[1](torch.ones(1, 3, dtype=torch.float16)).tolist() == [[1, 2, 0.5]]
    assert net[1](torch.ones(1, 3, dtype=torch.float16)).dtype == torch.float16


def test_a_checkpoint_brings_them_and_one_without_takes_them_away(net):
    plain = {key: value.clone() for key, value in net.state_dict().items()}
    net[1].give(torch.rand(3))
    own = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(plain)
    assert not made_factors(net)
    net.load_state_dict(own)
    assert torch.equal(net[1].weight, own["1.weight"])


def test_what_passes_keep_and_give_back_has_them_or_not(net):
    before = state_of(net)
    net[1].give(torch.rand(3))
    after = state_of(net)
    give_state(net, before)
    assert not made_factors(net)
    give_state(net, after)
    assert torch.equal(net[1].weight, after["1.weight"])


def test_an_optimizer_that_goes_on_from_what_was_kept_still_has_them(net):
    net[1].give(torch.ones(3))
    kept, held = state_of(net), net[1].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    give_state(net, kept)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert net[1].weight is held and not torch.equal(net[1].weight, kept["1.weight"])
