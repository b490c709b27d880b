"""OpenVINO gives with open shapes what it gives with fixed ones: users load our files without reshaping them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import swin_quant as sq
from swin_quant.base.compat import import_timm

openvino = pytest.importorskip("openvino")


class Joined(nn.Module):
    """A convolution without a bias whose output is read twice, by an addition too."""

    def __init__(self, join, groups=1):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 18, 3, padding=1, bias=False, groups=groups), nn.GroupNorm(2, 18)
        self.join, self.head = join, nn.Linear(18, 10)

    def forward(self, x):
        return self.head(self.join(self.stem(x), self.norm).mean((-1, -2)))


def poolformer():
    import_timm()  # allows torchvision beside a CPU-only torch
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    found = transformers.PoolFormerForImageClassification(transformers.PoolFormerConfig(num_labels=10, depths=[1] * 4))

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = found

        def forward(self, x):
            return self.network(x).logits

    return Logits(), 128


NETWORKS = {
    "itself": lambda: (Joined(lambda x, norm: x + torch.tanh(x)), 16),
    "a norm": lambda: (Joined(lambda x, norm: x - norm(x)), 16),
    "its mean": lambda: (Joined(lambda x, norm: x + x.mean((-1, -2), keepdim=True)), 16),
    "groups": lambda: (Joined(lambda x, norm: x - norm(x), groups=3), 16),
    "PoolFormer": poolformer,
}


SLOW = {"PoolFormer": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in NETWORKS])
def test_open_shapes_give_what_fixed_shapes_give(name, tmp_path):
    module, side = NETWORKS[name]()
    images = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module.eval()(images)
    model = sq.wrap(module, side)
    sq.calibrate(model, [images], passes=[])
    file = sq.export(model, "openvino", tmp_path).file
    core = openvino.Core()
    found = torch.from_numpy(core.compile_model(core.read_model(file), "CPU")(images.numpy())[0])
    error = (found - expected).square().sum() / expected.square().sum()
    assert -10 * error.log10() > 25


@pytest.mark.slow
def test_verify_warns_of_a_file_that_open_shapes_change(tmp_path, caplog):
    """OpenVINO 2026.4 does so to timm's MViTv2, whose biases are added to a part of the logits in place."""
    import_timm()
    from timm.models import mvitv2

    torch.manual_seed(0)
    sizes = {"depths": (1, 1), "embed_dim": (32, 64), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2))}
    module = mvitv2.MultiScaleVit(mvitv2.MultiScaleVitCfg(**sizes), img_size=64, num_classes=10).eval()
    nn.init.normal_(module.head.fc.weight, std=0.3)
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        (tmp_path / split / "some").mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / "some" / f"{number}.png")
    preprocess = sq.Preprocess(64, True, "bicubic", mean=(0, 0, 0), std=(1, 1, 1), crop_ratio=1.0)
    model = sq.calibrate(sq.wrap(module, 64, preprocess=preprocess), str(tmp_path), passes=[])
    assert sq.verify(sq.export(model, "openvino", tmp_path / "out"), str(tmp_path))
    assert "computes something else (mean |Δlogit| " in caplog.text and "where shapes are left open" in caplog.text
