"""Replacements: equal to torch's results, function by function and in whole models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.base.errors import UsageError
from swin_quant.operators import replacements as r
from swin_quant.operators.replacements import Replacing, compare
from swin_quant.operators.trace import trace

x = torch.randn(2, 6, 8, 5, generator=torch.Generator().manual_seed(1))
INDEX = torch.tensor([[0, 5, 5], [3, 1, 2]])
EQUAL = {
    "roll": lambda x: torch.roll(x, (-2, 3), (1, 2)),
    "roll beyond": lambda x: x.roll(11, dims=-2),
    "roll by nothing": lambda x: torch.roll(x, (0, 6), (0, 1)),
    "unbind": lambda x: torch.stack([a * 2 for a in x.unbind(1)]),
    "select": lambda x: x[1] + x[-2],
    "index": lambda x: x[0][INDEX],
    "flatten": lambda x: x.flatten(1, 2),
    "squeeze": lambda x: x[:, :1].squeeze(1) + x[:, :1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_moves_data_is_equal_to_the_bit(name):
    with Replacing(r.REPLACEMENTS) as replacing:
        found = EQUAL[name](x)
    assert sum(replacing.done.values()) and torch.equal(found, EQUAL[name](x))


@pytest.mark.parametrize("size", [1, 4])
def test_adaptive_pooling(size):
    with Replacing(r.chosen(["pool1d", "pool2d"])) as replacing:
        one, two = F.adaptive_avg_pool1d(x[0], size if size == 1 else 5), F.adaptive_avg_pool2d(x, (size, 1))
    assert replacing.done == {"pool1d": 1, "pool2d": 1}
    torch.testing.assert_close(one, F.adaptive_avg_pool1d(x[0], size if size == 1 else 5))
    torch.testing.assert_close(two, F.adaptive_avg_pool2d(x, (size, 1)))


def test_pooling_of_unequal_parts_is_left_alone():
    with Replacing(r.REPLACEMENTS) as replacing:
        assert F.adaptive_avg_pool1d(x[0], 3).shape == (6, 8, 3)
    assert not replacing.done["pool1d"]


def test_a_linear_for_each_of_q_k_and_v():
    qkv = nn.Linear(5, 15)
    with Replacing(r.chosen(["qkv_linears"])) as replacing, torch.no_grad():
        found, product = qkv(x), x @ qkv.weight.T
    assert replacing.done == {"qkv_linears": 2}
    torch.testing.assert_close(found, qkv(x))
    torch.testing.assert_close(product, x @ qkv.weight.T)


@pytest.mark.parametrize("column_first", [True, False])
def test_patch_merging_of_strided_slices(column_first):
    """As Microsoft wrote it, and in the other order of neighbours."""

    def merge(x):
        a, b, c, d = x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]
        return torch.cat([a, b, c, d] if column_first else [a, c, b, d], -1)

    with Replacing(r.chosen(["patch_merging"])) as replacing:
        found = merge(x)
    assert replacing.done == {"patch_merging": 1} and torch.equal(found, merge(x))
    with Replacing(r.chosen(["patch_merging"])) as replacing:
        torch.cat([x[:, 0::2, 0::2, :]] * 4, -1)  # four equal quarters are no merging
    assert not replacing.done


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_on_whole_models(tiny_model, kind):
    model = tiny_model(kind)
    images = torch.randn(2, *model.input_shape)
    found = compare(model, images, r.REPLACEMENTS)
    for name in ("roll", "qkv_split", "gather"):
        assert found[name][0] and found[name][1] == 0.0, name
    assert found["qkv_linears"][0] and found["qkv_linears"][1] < 1e-4
    assert found["pool1d"] == (0, 0.0)
    calls = trace(model, images.shape, lambda: Replacing(r.chosen(["roll", "gather"])))
    assert not {"roll", "index"} & {call.name for call in calls}


@pytest.mark.parametrize("names", [["rol"], ["roll", "roll"]])
def test_a_name_that_is_none_or_given_twice(names):
    with pytest.raises(UsageError, match="rol"):
        r.chosen(names)
