"""Unprepared tensors are distinguished from prepared pictures, with the right call in the message."""

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.errors import UsageError
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

KINDS = {
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "inception": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "pixels": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}


def preprocess(kind: str) -> Preprocess:
    return Preprocess(32, False, "bicubic", *KINDS[kind])


def pixels(dark: bool = False) -> torch.Tensor:
    """uint8 [8, 32, 32, 3]: smooth pictures with noise, of all levels or of few."""
    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((32, 32)) for _ in range(8)]
    return torch.from_numpy(np.stack([np.asarray(image) for image in small])) // (8 if dark else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dark", [False, True])
def test_pictures_and_random_numbers_pass_without_a_word(kind, dark, caplog):
    known = preprocess(kind)
    for images in (
        known.normalised(pixels(dark)),
        torch.randn(8, 3, 32, 32),
        torch.randn(2, 3, 8, 8).half(),
        torch.zeros(1, 3, 32, 32),
        torch.zeros(0, 3, 32, 32),
    ):
        Prepared(known)(images)
    assert not caplog.records


def given(images: torch.Tensor, known: Preprocess, error: UsageError) -> torch.Tensor:
    """The result of the call at the end of a message on `images`."""
    call = str(error).rpartition("give ")[2]
    return eval(call, {"images": images, "model": type("", (), {"preprocess": known})})


@pytest.mark.parametrize("kind", ["imagenet", "inception", "cifar", "none"])
@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda raw: raw.permute(0, 3, 1, 2), "are uint8, not normalised"),
        (lambda raw: raw.permute(0, 3, 1, 2).long(), "are int64, not normalised"),
        (lambda raw: raw.permute(0, 3, 1, 2).float(), "pixels that are not normalised"),
        (lambda raw: preprocess("imagenet").normalised(raw).permute(0, 2, 3, 1), "have their channels last"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_the_right_call(kind, make, reason):
    known = preprocess(kind)
    images = make(pixels())
    with pytest.raises(UsageError, match=reason) as caught:
        Prepared(known)(images)
    wanted = preprocess("imagenet" if "last" in reason else kind).normalised(pixels())
    assert torch.equal(given(images, known, caught.value), wanted)


@pytest.mark.parametrize(
    "kind, make, reason",
    [
        ("imagenet", lambda raw, known: raw.permute(0, 3, 1, 2) / 255, "pixels / 255"),
        ("inception", lambda raw, known: raw.permute(0, 3, 1, 2) / 255, "pixels / 255"),
        ("imagenet", lambda raw, known: twice(raw, known), "normalised twice"),
        ("inception", lambda raw, known: twice(raw, known), "normalised twice"),
        ("cifar", lambda raw, known: twice(raw, known), "normalised twice"),
        ("imagenet", lambda raw, known: raw.permute(0, 3, 1, 2).float() - 120, "prepare them as"),
    ],
)
def test_what_hardly_is_prepared_is_warned_of_once(kind, make, reason, caplog):
    known = preprocess(kind)
    looks = Prepared(known)
    for _ in range(2):
        looks(make(pixels(), known))
    (line,) = (record.getMessage() for record in caplog.records)
    assert reason in line and "\n" not in line


def test_every_call_is_looked_at(caplog):
    """A service or a loop may prepare the first batch well, and later ones not."""
    known, raw = preprocess("imagenet"), pixels().permute(0, 3, 1, 2)
    looks = Prepared(known)
    looks(known.normalised(pixels()))
    looks(raw / 255)
    assert [record.getMessage().count("pixels / 255") for record in caplog.records] == [1]
    with pytest.raises(UsageError, match="pixels that are not normalised"):
        looks(raw.float())


@pytest.mark.parametrize("kind", ["imagenet", "inception", "cifar", "none"])
def test_pixels_are_preprocessed(kind):
    known = preprocess(kind)
    assert torch.equal(Prepared(known)(pixels()), known.normalised(pixels()))


def twice(raw: torch.Tensor, known: Preprocess) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (known.mean, known.std))
    return (known.normalised(raw) - mean) / std


def test_without_preprocessing_only_types_and_layout_are_known(caplog):
    looks = Prepared(None, (1, 8, 8))
    looks(torch.rand(2, 1, 8, 8) * 255)
    for images, reason in (
        (torch.zeros(2, 8, 8, 1), "channels last"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "are uint8"),
        (torch.zeros(1, 8, 8), r"images\[None\]"),
    ):
        with pytest.raises(UsageError, match=reason):
            looks(images)
    assert not caplog.records
