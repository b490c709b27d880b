"""The sweep over other publishers' models: rows, the traces of a killed process, and a page's counts."""

import time
from pathlib import Path

import pytest

from swin_quant.base.compat import import_timm, import_torchvision


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return __import__("sweep")


NETWORKS = """
import time

from torch import nn

class Depends(nn.Module):
    def forward(self, images):
        return images.flatten(1) if images.sum() > 0 else -images.flatten(1)


def right():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5)), 8


def depends():
    return Depends(), 8


def slow():
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_row_goes_the_whole_way_or_says_where_it_ended_and_a_second_sweep_makes_none_again(script, tmp_path):
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)
    models = [f"{file}:{name}" for name in ("right", "depends")]
    rows = script.sweep(models, tmp_path, None, limit=300)
    right, depends = rows
    assert right.is_whole and (right.quantized, right.products, right.share) == (2, 2, 1.0)
    assert min(right.fake, right.openvino, right.onnxruntime) > 20 and right.behind < 3
    assert depends.error.startswith("wrap: SwinQuantError: ")
    start = time.monotonic()
    assert script.sweep(models, tmp_path, None, limit=300) == rows
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_model_that_takes_too_long_leaves_its_stage(script, tmp_path):
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)
    (slow,) = script.sweep([f"{file}:slow"], tmp_path, None, limit=8)
    assert slow.error in ("build: did not end", "start: did not end")


def test_the_page_counts_and_has_the_worst_first(script):
    rows = [
        script.Swept("good", fake=30, openvino=29.5, onnxruntime=30, nncf=20, times=0.9),
        script.Swept("low", fake=12, openvino=12, onnxruntime=12, nncf=13, share=0.4, times=1.5),
        script.Swept("behind", fake=40, openvino=40, onnxruntime=20, share=1.0),
        script.Swept("fallen", error="wrap: no", nncf=9),
    ]
    page = script.markdown(rows)
    table = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert table == ["model", "fallen", "behind", "low", "good"]
    for said in ("3 of 4; errors: 1", "an engine more than 3 dB below fake-quant: 1"):
        assert said.lower() in page.lower()
    assert "NNCF takes 3: 2 go the whole way, 1 are above NNCF" in page
    assert "Latency on OpenVINO, of 2: 1 not above NNCF's." in page


def test_every_model_of_the_lists_is_one(script):
    assert set(script.TIMM) <= set(import_timm().list_models())
    assert set(script.TORCHVISION) <= set(import_torchvision().models.list_models())
    assert len(script.TORCHVISION) == len(script.TRANSFORMERS) == 25
