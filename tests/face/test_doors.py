"""Every door of the face looks at the tensors that it is given."""

import pytest
import torch

import swin_quant as sq
from swin_quant.base.errors import UsageError
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

PREPROCESS = Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
PIXELS = torch.randint(0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.zeros(4).long()

DOORS = {
    "the model": lambda model, images: model(images),
    "calibrate": lambda model, images: sq.calibrate(model, [images], "qdq", passes=[]),
    "evaluate": lambda model, images: sq.evaluate(model, [(images, LABELS)], [], half="none"),
    "sensitivity": lambda model, images: sq.sensitivity(model, [images], "qdq"),
    "align": lambda model, images: sq.align(model, model, [images]),
    "analyze": lambda model, images: sq.analyze(model, images),
    "a loader": lambda model, images: sq.calibrate(
        model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, LABELS), 2), "qdq", passes=[]
    ),
}


@pytest.fixture
def model(tiny_model):
    return sq.Model(tiny_model("swin", IMG_SIZE=32, WINDOW_SIZE=4, DEPTHS=[1], NUM_HEADS=[1]), preprocess=PREPROCESS)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.float(), lambda x: x.permute(0, 2, 3, 1)])
def test_pixels_are_refused_where_they_enter(model, door, make):
    with pytest.raises(UsageError, match="not normalised: give model.preprocess"):
        DOORS[door](model, make(PIXELS))


def test_only_the_first_call_of_a_model_looks_at_values(model, caplog):
    for _ in range(3):
        model(PIXELS / 255)
    assert caplog.text.count("pixels / 255") == 1
    with pytest.raises(UsageError, match="uint8"):
        model(PIXELS)


@pytest.mark.slow
def test_an_engine_looks_as_well(model, tmp_path):
    pytest.importorskip("onnxruntime")
    sq.calibrate(model, [PREPROCESS.normalised(PIXELS.permute(0, 2, 3, 1))], "qdq", passes=[])
    exported = sq.export(model, "onnxruntime", tmp_path)
    for images in (PIXELS, PIXELS.float()):
        with pytest.raises(UsageError, match="not normalised"):
            exported.load()(images)
