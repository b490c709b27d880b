"""The input of a convolution after concatenations is the same on OpenVINO as in fake-quant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swin_quant as sq

pytestmark = pytest.mark.slow


class Fire(nn.Module):
    """Branches with different ranges, joined twice, as in a SqueezeNet."""

    def __init__(self, joined):
        super().__init__()
        self.stem, self.joined = nn.Conv2d(3, 8, 3, padding=1), joined
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.a(x)), 3 * F.relu(self.b(x))], 1)
        if self.joined == "twice":
            x = torch.cat([self.c(x), 5 * self.d(x)], 1)
        if self.joined == "pooled":
            x = F.max_pool2d(F.relu(x), 3, 2, ceil_mode=True)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


@pytest.mark.parametrize("joined", ["once", "twice", "pooled"])
def test_openvino_computes_what_fake_quant_does(joined, tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    model = sq.calibrate(sq.wrap(Fire(joined), 16, name="fire"), [x], "qdq", passes=[])
    wanted = model(x)
    found = sq.export(model, "openvino", tmp_path).load()(x)
    assert 20 * torch.log10(wanted.norm() / (found - wanted).norm()) > 40, "it was 22 to 31 dB"
