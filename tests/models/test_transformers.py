"""Micro networks of transformers (`benchmarks/networks.py`): captured, they compute what transformers does."""

from pathlib import Path

import pytest
import torch
from nightly import share

import swin_quant as sq
from swin_quant.base.compat import import_timm

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # its import takes seconds
QUICK = ["Swin", "ViT", "CLIP", "DINOv3", "Swin2SR", "SigLIP", "CLAP", "ConvNeXt", "SegFormer"]


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return __import__("networks")


@pytest.mark.parametrize("name", share(QUICK[:4], 3) + share(QUICK[3:], len(QUICK))[1:])
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


@pytest.mark.nightly  # `test_legal_modules` has `len` of a tensor
def test_a_publisher_s_batch_that_is_the_length_of_a_tensor_is_any_batch(networks):
    """`batch_size = len(source_flatten)` in modeling_rt_detr.py; `wrap` compares batches of two sizes."""
    assert sq.wrap(networks.built("RT-DETR"), (3, 64, 64), name="x").name == "x"


@pytest.mark.parametrize("kind", ["Swin", "Swinv2"])
@pytest.mark.parametrize(
    ("size", "window", "is_ours"),
    [
        ((128, 192), 4, True),
        ((224, 448), 7, True),
        ((64, 96), 4, False),  # its last map is no larger than a window along one side
        ((192, 224), 7, False),  # its windows are padded
    ],
)
def test_a_classifier_of_oblong_pictures_needs_its_size_and_is_what_transformers_computes_where_windows_fit(
    kind, size, window, is_ours, tmp_path, randomise
):
    """Where windows do not fit, it is another network indeed."""
    import_timm()  # transformers imports torchvision, which needs its help
    import transformers

    about = {"image_size": size, "window_size": window, "embed_dim": 16, "num_labels": 5}
    settings = getattr(transformers, f"{kind}Config")(**about, depths=[2, 2, 2], num_heads=[1, 2, 4])
    theirs = getattr(transformers, f"{kind}ForImageClassification")(settings).eval()
    randomise(theirs, seed=1)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(sq.UsageError, match=r"transformers may cut windows .* in another way: set DATA.IMG_SIZE"):
        sq.load(tmp_path)
    ours = sq.load(tmp_path, img_size=size)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = theirs(images).logits
        distance = (ours(images) - logits).abs().max() / logits.std()
    assert distance < 1e-5 if is_ours else distance > 1e-3


@pytest.mark.nightly
def test_a_network_that_torch_exports_for_one_batch_alone_is_refused(tmp_path):
    """ZoeDepth is captured for every batch, and torch's ONNX exporter then fixes it at that of the example."""
    import_timm()  # allows torchvision beside a CPU-only torch
    import transformers

    backbone = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.ZoeDepthConfig(
        backbone_config=backbone, backbone_hidden_size=32, neck_hidden_sizes=[8, 16, 16, 16], fusion_hidden_size=16,
        bottleneck_features=16, num_relative_features=8, num_attractors=[4, 2, 2, 1], bin_embedding_dim=8,
        bin_configurations=[{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0, "name": "NYU"}],
    )  # fmt: skip
    module = transformers.ZoeDepthForDepthEstimation(config).eval()
    model = sq.wrap(module, 64, name="zoe", output="predicted_depth")
    sq.calibrate(model, [torch.randn(4, 3, 64, 64)], "qdq", passes=[])
    with pytest.raises(sq.SwinQuantError, match="for one batch size alone"):
        sq.export(model, "onnxruntime", tmp_path)
    assert not list(tmp_path.glob("*.onnx"))
