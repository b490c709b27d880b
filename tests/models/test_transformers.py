"""Micro networks of transformers (`benchmarks/networks.py`): captured, they compute what transformers does."""

from pathlib import Path

import pytest
import torch

import swin_quant as sq

pytest.importorskip("transformers")
QUICK = ["Swin", "Swin2SR", "CLAP", "CLIP", "ViT", "DINOv3", "SigLIP", "ConvNeXt", "SegFormer"]


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return __import__("networks")


@pytest.mark.parametrize("name", QUICK)
def test_a_network_computes_what_transformers_computes_and_is_calibrated(name, networks):
    network, module = networks.NETWORKS[name], networks.built(name)
    images = network.given(torch.randn(4, *network.shape, generator=torch.Generator().manual_seed(0)))
    model = sq.wrap(module, images if network.others else network.shape, name=name, output=network.output)
    with torch.inference_mode():
        given = module(**images) if network.others else module(images)
        exact = model.module(model.prepared(images))
    outputs = model.card.wrapped["outputs"]
    for key, ours in zip(outputs, exact if isinstance(exact, list) else [exact], strict=True):
        words = key.split(".")
        theirs = given[words[0]][int(words[1])] if len(words) > 1 else given[key]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    sq.calibrate(model, [images], "qdq", passes=[])
    assert model.card.calibration["coverage"]["share"] > 0.99
    found = model(images)
    found = [found] if len(outputs) == 1 else list(found.values())
    for quantized, float_one in zip(found, exact if isinstance(exact, list) else [exact], strict=True):
        assert 20 * torch.log10(float_one.norm() / (quantized - float_one).norm()) > 15


def test_a_fixed_batch_is_refused_with_the_line_of_the_publisher(networks):
    with pytest.raises(
        sq.SwinQuantError, match=r"alone at modeling_rt_detr.py:\d+ `batch_size = len\(source_flatten\)`"
    ):
        sq.wrap(networks.built("RT-DETR"), (3, 64, 64), name="x")
