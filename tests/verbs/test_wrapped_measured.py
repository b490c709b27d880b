"""`bench` and `align` of a wrapped module, which no file builds: artifacts beside each other, and beside the model."""

import csv
import math

import pytest
import torch
from torch import nn

import swin_quant as sq
from swin_quant.base.errors import UsageError
from swin_quant.score.bench import BenchPlan
from swin_quant.verbs.bench import bench

QUICK = BenchPlan((1,), 1, 0.001, 1)


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
def test_the_artifacts_of_a_wrapped_module_are_timed_beside_its_float_one(exported, images, engines_here):
    model, quantized, plain = exported
    rows = bench([str(quantized.file), str(plain.file)], QUICK).rows
    assert [row.precision for row in rows] == ["float32", "int8"] and rows[1].baseline == rows[0].candidate
    noise = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one, other = (torch.cat([part.flatten(1) for part in model(noise).values()], 1), None)
    with torch.inference_mode():
        other = torch.cat([part.flatten(1) for part in plain.load()(noise).values()], 1)
    sqnr = 10 * math.log10(float(other.square().sum() / (one - other).square().sum()))
    assert rows[1].sqnr_db == pytest.approx(sqnr, abs=0.5) and rows[1].agreement is None and rows[1].p50_ms > 0


@pytest.mark.slow
def test_one_artifact_is_timed_alone_from_the_command_line(run, exported, tmp_path, engines_here):
    _, quantized, _ = exported
    words = ("--batch", 1, "--rounds", 1, "--seconds", 0.001, "--threads", 1)
    run("bench", quantized.file, *words, "--output", tmp_path).ok()
    (row,) = csv.DictReader((tmp_path / "bench.csv").open())
    assert row["candidate"].startswith("onnxruntime int8") and not row["baseline"] and float(row["p50_ms"]) > 0


def test_the_checkpoint_of_a_wrapped_module_is_refused(images, tmp_path):
    file = sq.calibrate(sq.wrap(Net(), 8, channels=1, name="net"), [images]).save(tmp_path / "net.pth")
    with pytest.raises(UsageError, match="net: is a wrapped module, which only Python builds: bench what it exports"):
        bench([str(file)], QUICK)


@pytest.mark.slow
def test_a_wrapped_module_is_aligned_with_its_artifact(exported, images):
    model, quantized, _ = exported
    for found in (sq.align(model, quantized, [images]), sq.align(model, str(quantized.file), [images])):
        names = [row.name for row in found.rows]
        assert {"one", "two", "map.0", "map.1"} <= {*names} and found.first is None
        assert all(row.sqnr_db > 30 for row in found.rows)
