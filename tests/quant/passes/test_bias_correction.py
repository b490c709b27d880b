"""Bias correction: every channel's mean is float's again, and the original float network stays the baseline."""

import pytest
import torch
from torch import nn

import swin_quant as sq
from swin_quant.quant.policy import quantize
from swin_quant.quant.watch import watching


class Depthwise(nn.Module):
    """A network that loses most without the correction: few weights a channel, inputs after ReLU."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.dw, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.bn0(self.stem(x)))
        x = x + torch.relu(self.bn1(self.dw(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Depthwise()
    with torch.no_grad():
        for _ in range(20):
            net(torch.randn(16, 3, 8, 8))
    return net.eval()


def means(module, x, names):
    """float64 [channels] of what these parts give, by hooks."""
    found = {}

    def look(name, layer, inputs, y):
        found[name] = y.double().mean([dim for dim in range(y.dim()) if dim != (1 if y.dim() == 4 else y.dim() - 1)])

    with torch.no_grad(), watching({name: module.get_submodule(name) for name in names}, look):
        module(x)
    return found


def test_the_mean_of_every_channel_is_float_s_where_only_weights_are_quantized(net):
    x = torch.randn(16, 3, 8, 8)
    policy = sq.policy("qdq").off("role:gemm_input").off("role:one_sided_input").off("role:residual")
    found = {}
    for passes in ([], ["bias_correction"]):
        model = sq.calibrate(sq.wrap(net, 8), [x], policy, passes=passes)
        wanted = means(net, x, ["bn0", "bn1", "head"])  # the norms are folded into the layers before them
        quantize(model.module)
        corrected = means(model.module, x, ["stem", "dw", "head"])
        pairs = zip(corrected.items(), wanted.values(), strict=True)
        found[len(passes)] = {name: (mean - one).abs().max() for (name, mean), one in pairs}
    assert found[1]["stem"] < 1e-6 < 1e-4 < found[0]["stem"], "the first layer's inputs are float's"
    assert found[1]["dw"] < found[0]["dw"] / 2


def test_it_runs_by_itself_behind_folded_norms_and_deltas_are_with_the_original(net):
    x, labels = torch.randn(64, 3, 8, 8), torch.arange(64) % 5
    with torch.no_grad():
        exact = net(x)
    plain = sq.calibrate(sq.wrap(net, 8), [x], "qdq", passes=[])
    model = sq.calibrate(sq.wrap(net, 8), [x], "qdq")
    assert [one["name"] for one in model.card.calibration["passes"]] == ["bias_correction"]
    assert (model(x) - exact).norm() < (plain(x) - exact).norm()
    found = sq.evaluate(model, [(x, labels)], half="none")
    assert found.float32.acc1 == pytest.approx(100 * float((exact.argmax(1) == labels).float().mean()))
    assert found.quantized.sqnr_db == pytest.approx(
        float(20 * torch.log10(exact.norm() / (model(x) - exact).norm())), abs=0.1
    )
