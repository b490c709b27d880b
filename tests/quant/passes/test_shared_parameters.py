"""Passes leave parameters that are read twice as the user gave them: what helps one reader would harm the other."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swin_quant as sq
from swin_quant.quant.passes.places import found


class Tied(nn.Module):
    """Blocks that share a weight, a bias, and a norm; the last bias is also read by itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b, self.c, self.out = (
            nn.Linear(3, 8),
            *(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 5),
        )
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.b.weight, self.c.bias, self.second.weight = self.a.weight, self.b.bias, self.first.weight
        nn.init.normal_(self.first.bias, 3, 2)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        x = self.c(self.second(self.b(self.a(self.first(x)).relu()).relu())).relu()
        return self.out(x).mean(1) + self.out.bias


SHARED = ("a.weight", "b.bias", "out.bias", "first.weight")
PASSES = {
    "bias_correction": {},
    "gptq": {},
    "reconstruct": {"iterations": 20, "drop": 0.0},
}


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(12, 3, 8, 8)


def made():
    torch.manual_seed(0)
    return Tied().eval()


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_changes_all_but_them(name, x, tmp_path):
    given, wanted, fresh = made(), made(), Tied().eval()
    policy, steps = sq.policy("qdq").bits("role:gemm_weight", 4), [{"name": name, **PASSES[name]}]
    model = sq.calibrate(sq.wrap(given, 8), list(x.split(4)), policy, passes=steps)
    network = model.module
    changed = {key for key, one in wanted.named_parameters() if not torch.equal(one, network.get_parameter(key))}
    assert changed and changed.isdisjoint(SHARED)
    assert network.b.weight is network.a.weight and network.c.bias is network.b.bias
    with torch.no_grad():
        assert torch.equal(model.original(x), wanted(x))
        assert torch.equal(sq.load(model.save(tmp_path / "tied.pth"), fresh)(x), model(x))


def test_a_weight_that_one_layer_borrows_alone_is_its_own(x):
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = sq.wrap(nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), module, nn.Linear(8, 5)).eval(), 8)
    assert not any(getattr(part, "shared_parameters", ()) for part in model.module.modules())


@pytest.mark.parametrize("read", [True, False])
def test_no_offset_moves_into_a_bias_that_is_read_elsewhere(read):
    class Module(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + (self.last.bias if read else 0)

    parts = {"flat": nn.Flatten(), "norm": nn.LayerNorm(192), "last": nn.Linear(192, 5)}
    network = sq.wrap(Module(OrderedDict(parts)).eval(), 8).module
    (exchange,) = found(network.own_exchanges, network)
    assert exchange.offset is None if read else exchange.offset.name == "norm.bias"


def test_a_bias_that_a_function_reads_is_shared():
    class Reads(Tied):
        def forward(self, x):
            return F.layer_norm(self.embed(x.flatten(2).transpose(1, 2)), (8,), None, self.embed.bias)

    assert sq.wrap(Reads().eval(), 8).module.embed.shared_parameters == {"bias"}
