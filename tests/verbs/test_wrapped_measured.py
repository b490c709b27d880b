"""`bench` and `align` of a wrapped module, which no file builds: artifacts beside each other, and beside the model."""

import json
import math

import pytest
import torch
from torch import nn

import swin_quant as sq

QUICK = ("--batch", 1, "--rounds", 1, "--seconds", 0.001, "--threads", 1)


class Net(nn.Module):
    """A tensor that is no class: a map [B, 4, 8, 8], and its mean [B, 4]."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        found = self.two(self.one(x).relu())
        return {"map": found, "mean": found.mean((2, 3))}


@pytest.fixture(scope="module")
def images():
    return torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, images):
    """A calibrated model, its int8 artifact and its float one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wrapped")
    model = sq.calibrate(sq.wrap(Net(), 8, channels=1, name="net"), [images])
    quantized = sq.export(model, "onnxruntime", folder)
    return model, quantized, sq.export(model, "onnxruntime", folder, precision="float")


@pytest.mark.slow
def test_the_artifacts_of_a_wrapped_module_are_timed_beside_its_float_one(run, exported, engines_here):
    model, quantized, plain = exported
    one, other = json.loads(run("bench", quantized.file, plain.file, *QUICK, "--json").ok().out)["rows"]
    assert [one["precision"], other["precision"]] == ["float32", "int8"] and other["baseline"] == one["candidate"]
    noise = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, exact = (torch.cat([part.flatten(1) for part in of(noise).values()], 1) for of in (model, plain.load()))
    sqnr = 10 * math.log10(float(exact.square().sum() / (found - exact).square().sum()))
    assert other["sqnr_db"] == pytest.approx(sqnr, abs=0.5) and other["agreement"] is None and other["p50_ms"] > 0


def test_the_checkpoint_of_a_wrapped_module_is_refused(run, images, tmp_path):
    file = sq.calibrate(sq.wrap(Net(), 8, channels=1, name="net"), [images]).save(tmp_path / "net.pth")
    assert "net: is a wrapped module, which only Python builds: bench what it exports" in run("bench", file).error(2)


@pytest.mark.slow
def test_a_wrapped_module_is_aligned_with_its_artifact(exported, images):
    model, quantized, _ = exported
    for found in (sq.align(model, quantized, [images]), sq.align(model, str(quantized.file), [images])):
        names = [row.name for row in found.rows]
        assert {"one", "two", "map.0", "map.1"} <= {*names} and found.first is None
        assert all(row.sqnr_db > 30 for row in found.rows)
