"""Pictures as bytes in, probabilities and the best classes out: the same function on every engine."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.onnx.export import OnnxOptions
from swin_quant.backends.onnx.network import fold_normalisation, with_ends
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.preprocess import Preprocess

PREPROCESS = Preprocess(32, False, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
UNEVEN = Preprocess(32, False, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (3, 32, 32, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def prepared(pixels, preprocess=PREPROCESS):
    """Prepared as torchvision does it."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    return (pixels.permute(0, 3, 1, 2).float().div(255) - mean) / std


@pytest.mark.parametrize("preprocess", [PREPROCESS, UNEVEN], ids=["even", "uneven"])
def test_pixels_come_back_exactly_from_prepared_pictures(preprocess):
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert torch.equal(preprocess.pixels(prepared(every, preprocess)), every)
    assert torch.equal(preprocess.normalised(every), prepared(every, preprocess))
    beyond = torch.tensor([-99.0, 99.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert preprocess.pixels(beyond).flatten().tolist() == [0] * 3 + [255] * 3


@pytest.mark.parametrize("padding", [0, 1])
def test_normalisation_in_a_convolution_and_before_one(pixels, padding):
    """It is folded if nothing is padded; a padding convolution pads with zeros of prepared pictures, not of pixels."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 4, stride=4, padding=padding)

        def forward(self, images):
            return self.conv(images).mean((2, 3))

    net = Net().requires_grad_(False)
    expected = net(prepared(pixels, UNEVEN))
    before = net.conv.weight.clone()
    if padding:
        with pytest.raises(ValueError, match="padded zeros are no pixels"):
            fold_normalisation(net.conv, UNEVEN)
    else:
        fold_normalisation(net.conv, UNEVEN)
    with_ends(net, OnnxOptions(uint8_input=True), UNEVEN, folded=not padding)
    assert torch.equal(net.conv.weight, before) == bool(padding)
    torch.testing.assert_close(net(pixels), expected, rtol=1e-5, atol=1e-5)
    assert list(net.state_dict()) == ["conv.weight", "conv.bias"]


@pytest.mark.nightly
def test_a_file_that_takes_pixels_computes_the_same(exported, run, pixels):
    """In float up to rounding; `test_swin_maps` has int8."""
    plain = exported("swin", precision="float")
    file = exported("swin", precision="float", uint8_input=True).file
    assert file.stem == f"{plain.file.stem}_uint8"
    (wanted,) = run(plain.file, prepared(pixels)).values()
    (given,) = run(file, pixels).values()
    np.testing.assert_allclose(given, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_engines_take_prepared_pictures_for_either(name, exported, pixels):
    """Callers that pass pictures to engines need not know which kind a file takes."""
    pytest.importorskip(name)
    images = prepared(pixels)
    plain = engine_loader(name)(exported("swin", precision="float"))(images)
    for count in (3, 1):
        engine = engine_loader(name)(exported("swin", precision="float", uint8_input=True))
        torch.testing.assert_close(engine(images[:count]), plain[:count], rtol=0, atol=1e-3)
        torch.testing.assert_close(engine(pixels[:count]), plain[:count], rtol=0, atol=1e-3)


def test_probabilities_and_the_best_classes_beside_logits(exported, run, images):
    artifact = exported("swin", precision="float", softmax=True, top_k=3)
    found = run(artifact.file, images)
    assert list(found) == ["logits", "probabilities", "top_classes", "top_probabilities"]
    expected = torch.from_numpy(found["logits"]).softmax(1)
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
    np.testing.assert_array_equal(found["top_classes"], expected.argsort(1, descending=True)[:, :3])
    np.testing.assert_allclose(found["top_probabilities"], expected.sort(1, descending=True).values[:, :3], atol=1e-6)
    (plain,) = run(exported("swin", precision="float").file, images).values()
    np.testing.assert_array_equal(found["logits"], plain)
    given = engine_loader("onnxruntime")(artifact)(images)  # our engines still give logits
    np.testing.assert_allclose(given, plain, atol=1e-4)


def forget(model, card):
    del model.metadata_props[:]
    return card


def otherwise(model, card):
    return replace(card, preprocess={**card.preprocess, "mean": [0.1, 0.2, 0.3]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget, "takes pixels, and does not say how it normalises them"),
        (otherwise, "prepares pictures differently from its run card"),
    ],
)
def test_files_of_pixels_that_do_not_say_how_they_prepare_them(change, said, exported, tmp_path):
    """The model and the card were changed by other tools."""
    artifact = exported("swin", precision="float", uint8_input=True)
    model, file = onnx.load(artifact.file), tmp_path / artifact.file.name
    card = change(model, artifact.card)
    onnx.save(model, file)
    with pytest.raises(SwinQuantError, match=said):
        engine_loader("onnxruntime")(finish_artifact(file, card, "onnx", "float32", {}))
