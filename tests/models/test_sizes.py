"""Pictures of another size than the model's are refused, and never answered with more rows."""

import pytest
import torch
from nightly import share
from torch import nn

import swin_quant as sq
from swin_quant.base.errors import UsageError

OTHERS = [(2, 3, 64, 64), (1, 3, 64, 64), (2, 3, 32, 64), (8, 3, 16, 16), (2, 1, 32, 32), (2, 32, 32, 3)]


class Windows(nn.Module):
    """A foreign network that takes the batch from the size, as Microsoft's Swin does."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.stem(x).flatten(2).transpose(1, 2).reshape(-1, 64, 8).mean(1))


@pytest.fixture(params=["swin", "swinv2", "wrapped"])
def model(request, tiny_model):
    if request.param == "wrapped":
        return sq.wrap(Windows(), 32)
    return sq.Model(tiny_model(request.param, IMG_SIZE=32, WINDOW_SIZE=4, DEPTHS=[1, 1], NUM_HEADS=[1, 2]))


def test_another_size_is_refused_in_words(model):
    assert model(torch.randn(3, 3, 32, 32)).shape[0] == 3
    for shape in OTHERS:
        for run in (model, model.module):
            with pytest.raises(UsageError, match=r"32, 32\]|channels last"):
                run(torch.randn(*shape))


@pytest.mark.parametrize("model", share(["wrapped", "swin"], 2), indirect=True)
def test_the_check_stays_when_a_model_is_compiled_or_exported(model):
    compiled = torch.compile(model.module, dynamic=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3, 32, 32)), model.module(torch.ones(2, 3, 32, 32)))
    with pytest.raises(UsageError):
        compiled(torch.ones(2, 3, 64, 64))
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model.module, (torch.ones(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    assert exported.module()(torch.ones(5, 3, 32, 32)).shape[0] == 5
    with pytest.raises(Exception, match="32|64"):
        exported.module()(torch.ones(2, 3, 64, 64))
