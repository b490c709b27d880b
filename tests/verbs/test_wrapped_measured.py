"""Latency and `align` of a wrapped module, which no file builds: artifacts beside each other, and beside the model."""

import json

import pytest
import torch
from torch import nn

import swin_quant as sq


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
def test_the_artifacts_of_a_wrapped_module_are_timed_beside_its_float_one(run, exported):
    _, quantized, plain = exported
    words = [plain.file, quantized.file, "--no-accuracy", "--batch", 2, "--threads", 1, "--json"]
    rows = json.loads(run("evaluate", *words).ok().out)
    assert {row["subject"] for row in rows} == {f"{one.file} on onnxruntime" for one in (plain, quantized)}
    assert all(row["batch"] == 2 and row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_a_wrapped_module_is_aligned_with_its_artifact(exported, images):
    model, quantized, _ = exported
    for found in (sq.align(model, quantized, [images]), sq.align(model, str(quantized.file), [images])):
        names = [row.name for row in found.rows]
        assert {"one", "two", "map.0", "map.1"} <= {*names} and found.first is None
        assert all(row.sqnr_db > 30 for row in found.rows)
