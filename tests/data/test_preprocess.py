"""The evaluation transform against timm, PIL and hand arithmetic; crops that depend only on seed and index."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess, augmented


def photo(width: int, height: int) -> Image.Image:
    """Smooth, noisy and asymmetric, so that a shift by one pixel shows."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + 2 * y) / 11)], axis=-1) * 90 + 128
    return Image.fromarray((waves + np.random.default_rng(0).uniform(-30, 30, waves.shape)).astype(np.uint8))


def config(size=224, crop=True, interpolation="bicubic", **aug) -> SimpleNamespace:
    defaults = dict(AUTO_AUGMENT="rand-m9-mstd0.5-inc1", COLOR_JITTER=0.4, REPROB=0.25, REMODE="pixel", RECOUNT=1)
    return SimpleNamespace(
        DATA=SimpleNamespace(
            IMG_SIZE=size, INTERPOLATION=interpolation, MEAN=IMAGENET_MEAN, STD=IMAGENET_STD, UPRIGHT=False
        ),
        TEST=SimpleNamespace(CROP=crop, CROP_RATIO=0.875, SHAPE="square"),
        AUG=SimpleNamespace(**(defaults | aug)),
    )


@pytest.mark.parametrize("size", [32, 192, 224, 256])
@pytest.mark.parametrize("shape", [(300, 200), (97, 401), (64, 64)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crop_equals_timms_evaluation_transform(size, shape, interpolation):
    import_timm()
    from timm.data import create_transform

    reference = create_transform(size, interpolation=interpolation, crop_pct=224 / 256)
    ours = Preprocess.from_config(config(size, True, interpolation))(photo(*shape))
    assert ours.dtype == torch.float32 and ours.shape == (3, size, size)
    assert torch.equal(ours, reference(photo(*shape)))


@pytest.mark.parametrize("size", [(192, 224), (48, 20), (60, 61), (48, 48)])
@pytest.mark.parametrize("shape", [(300, 200), (97, 401), (224, 192), (50, 50)])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_pictures_that_are_not_square_are_timms(size, shape, mode):
    """Resized until they cover both sides over the crop's ratio, or squashed; then cropped. timm rounds down."""
    import_timm()
    from timm.data import create_transform

    mean, std = (0.5, 0.5, 0.5), (0.2, 0.3, 0.4)
    reference = create_transform(size, interpolation="bicubic", mean=mean, std=std, crop_pct=0.9, crop_mode=mode)
    shaped = "squashed" if mode == "squash" else "square"
    ours = Preprocess(size, True, "bicubic", mean, std, 0.9, shaped)
    assert ours.sides == size and torch.equal(ours(photo(*shape)), reference(photo(*shape)))
    assert ours.to_dict()["crop_ratio"] == 0.9
    assert Preprocess.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


@pytest.mark.parametrize(
    ("size", "shape", "method"),
    [
        (384, (300, 200), "bicubic"),
        (32, (32, 32), "bicubic"),
        (32, (500, 375), "bicubic"),
        ((20, 30), (40, 70), "bilinear"),
    ],
)
def test_no_crop_resizes_both_sides_as_pil_does(size, shape, method):
    height, width = size if isinstance(size, tuple) else (size, size)
    resized = np.asarray(photo(*shape).resize((width, height), Image.Resampling[method.upper()])) / 255
    expected = ((resized - IMAGENET_MEAN) / IMAGENET_STD).transpose(2, 0, 1)
    ours = Preprocess.from_config(config(size, False, method))(photo(*shape))
    assert np.abs(ours.numpy() - expected).max() < 4e-6


GOOD = Preprocess.from_config(config(256, False, "bilinear")).to_dict()


@pytest.mark.parametrize(
    "values",
    [
        {key: value for key, value in GOOD.items() if key != "std"},
        GOOD | {"crop_pct": 0.9},
        GOOD | {"size": "224"},
        GOOD | {"size": 0},
        GOOD | {"size": 10**9},
        GOOD | {"size": True},
        GOOD | {"size": [224]},
        GOOD | {"size": [224, 0]},
        GOOD | {"size": [24, 40], "shape": "shorter"},
        GOOD | {"crop": 1},
        GOOD | {"upright": 1},
        GOOD | {"crop_ratio": 0.01},
        GOOD | {"crop_ratio": "0.9"},
        GOOD | {"crop_ratio": float("nan")},
        GOOD | {"interpolation": "cubic"},
        GOOD | {"interpolation": ["bicubic"]},
        GOOD | {"mean": [0.5, 0.5]},
        GOOD | {"mean": "abc"},
        GOOD | {"mean": None},
        GOOD | {"mean": [0.5, 0.5, 10**400]},
        GOOD | {"mean": [0.5, 0.5, float("inf")]},
        GOOD | {"std": [0.2, 0.2, 0.0]},
        GOOD | {"std": [0.2, 0.2, float("nan")]},
        [],
        None,
    ],
)
def test_a_run_card_with_other_keys_or_values_is_refused(values):
    with pytest.raises(SwinQuantError, match="^preprocess: "):
        Preprocess.from_dict(values)


def test_a_bad_configuration_names_its_keys():
    with pytest.raises(UsageError, match="DATA.INTERPOLATION: interpolation is 'cubic', but must be one of bicubic"):
        Preprocess.from_config(config(interpolation="cubic"))


def test_a_training_crop_depends_on_seed_and_index_alone():
    transform, other = augmented(config(64), seed=1), augmented(config(64), seed=2)
    image = photo(120, 90)
    crops = [transform(image, index) for index in range(8)]
    assert transform.sides == (64, 64) and crops[0].shape == (3, 64, 64) and crops[0].dtype == torch.float32
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    again = [augmented(config(64), seed=1)(image, index) for index in reversed(range(8))][::-1]
    assert all(map(torch.equal, crops, again))
    assert not any(torch.equal(crops[i], crops[j]) for i in range(8) for j in range(i))
    assert not any(torch.equal(crop, other(image, index)) for index, crop in enumerate(crops))


def test_training_crops_are_timms_with_the_settings_of_the_configuration():
    plain = augmented(config(64, AUTO_AUGMENT="none", COLOR_JITTER=0, REPROB=0.0))
    flat = torch.stack([plain(Image.new("RGB", (80, 80), (10, 20, 30)), index) for index in range(20)])
    assert torch.allclose(flat, flat[:1, :, :1, :1].expand_as(flat), atol=1e-5)  # crops and flips keep one colour
    erasing = augmented(config(64, AUTO_AUGMENT="none", COLOR_JITTER=0, REPROB=0.25))
    noisy = [erasing(Image.new("RGB", (80, 80)), index)[0].unique().numel() > 20 for index in range(200)]
    assert 25 <= sum(noisy) <= 80  # a quarter of 200, within five standard deviations; each pixel its own noise
