"""Pictures to logits: order, batches, a spread over pictures, and logits that are refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.folder import NamedPictures
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.score.engine import Engine
from swin_quant.score.run_engines import infer

PREPROCESS = Preprocess(8, False, "bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def pictures(tmp_path):
    for level in range(10):
        Image.new("RGB", (8, 8), (level * 20,) * 3).save(tmp_path / f"{level}.png")
    return NamedPictures([tmp_path])


def engine(run, limit=None, name="e"):
    return Engine(name, "float32", None, run, max_batch=limit)


def brightness(images):
    return images.mean((1, 2, 3))[:, None] * torch.tensor([1.0, -1.0])


def test_logits_come_in_the_order_of_the_pictures_whatever_the_batch(pictures):
    sizes = []
    engines = {"a": engine(lambda x: sizes.append(len(x)) or brightness(x), limit=4), "b": engine(brightness)}
    inferred = infer(engines, pictures, PREPROCESS, 2, PictureSet(batch=9))
    assert sizes == [4, 4, 2]  # the smallest limit of all engines
    np.testing.assert_allclose(inferred.logits["a"][:, 0], np.arange(10) * 20 / 255, atol=1e-6)
    assert torch.equal(inferred.logits["a"], inferred.logits["b"]) and inferred.names == list(pictures.names)


def test_unreadable_pictures_are_left_out_up_to_a_share(pictures, tmp_path):
    (tmp_path / "3.png").write_bytes(b"broken")
    inferred = infer({"a": engine(brightness)}, pictures, PREPROCESS, 2, PictureSet(batch=1, max_unreadable=1.0))
    assert inferred.unreadable == [str(tmp_path / "3.png")] and len(inferred.names) == 9 == len(inferred.logits["a"])
    with pytest.raises(SwinQuantError, match="1 of 10 pictures are unreadable"):
        infer({"a": engine(brightness)}, pictures, PREPROCESS, 2, PictureSet(max_unreadable=0.05))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: brightness(x)[:, :1], r"e: logits are \[10, 1\], not \[10, 2\]"),
        (lambda x: brightness(x)[0], r"e: logits are \[2, 1\], not \[10, 2\]"),
        (lambda x: brightness(x) / 0, "e: logits hold NaN or infinity"),
    ],
)
def test_logits_that_are_not_of_this_model(pictures, run, message):
    with pytest.raises(SwinQuantError, match=message):
        infer({"e": engine(run)}, pictures, PREPROCESS, 2)
