import random

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.train import batches as module
from swin_quant.train.batches import TrainingBatches, ValidationBatches, crop_and_flip
from swin_quant.train.recipe import Augmentation, Recipe

PREPROCESS = Preprocess(8, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
PLAIN = Augmentation(crop="none", flip=0.0)


class Noise(Pictures):
    """Pictures of 8 x 8 whose first pixel is their number; `broken` ones cannot be read."""

    def __init__(self, count, broken=()):
        self.names = [f"{index}.png" for index in range(count)]
        self.labels = [index % 3 for index in range(count)]
        self.class_names = ["a", "b", "c"]
        self.broken = set(broken)

    def open(self, index):
        if index in self.broken:
            raise UnreadablePicture(f"{index}.png: broken")
        pixels = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        pixels[0, 0, 0] = index
        return Image.fromarray(pixels)


def made(count=50, world=World(), pictures=None, max_unreadable=0.01, seed=0, augment=PLAIN, **recipe):
    recipe = Recipe(**{"batch_size": 4, "augment": augment} | recipe)
    return TrainingBatches(pictures or Noise(count), recipe, PREPROCESS, 3, seed, world, 0, max_unreadable)


def which(images):
    """The numbers of the pictures of a batch."""
    return (images[:, 0, 0, 0] * IMAGENET_STD[0] + IMAGENET_MEAN[0]).mul(255).round().int().tolist()


def epoch(data, number=0, start=0):
    return [[which(micro.images) for micro in step] for step in data.epoch(number, start)]


def assert_same(step, other):
    for one, two in zip(step, other, strict=True):
        assert torch.equal(one.images, two.images) and torch.equal(one.targets, two.targets) and one.place == two.place


def test_an_epoch_shows_each_picture_at_most_once_in_a_new_order_and_with_its_label():
    data, short = made(50), made(50, epoch_pictures=18)
    first, second = ([index for step in epoch(data, n) for micro in step for index in micro] for n in (0, 1))
    assert data.steps == 12 and len(first) == 48 == len(set(first)) and first != second != sorted(second)
    assert epoch(data, 0) == epoch(made(50), 0) != epoch(made(50, seed=1), 0)
    seen = [{index for step in epoch(short, n) for micro in step for index in micro} for n in (0, 1)]
    assert short.steps == 4 and all(len(pictures) == 16 for pictures in seen) and seen[0] != seen[1]
    for step in data.epoch(0):
        assert step[0].targets.tolist() == [index % 3 for index in which(step[0].images)]


@pytest.mark.parametrize("augment", [Augmentation(crop="padded", cutmix=1.0), Augmentation(mixup=1.0, erase=0.5)])
def test_two_ranks_see_in_a_step_what_one_sees_with_twice_the_accumulation(augment):
    one = list(made(augment=augment, accumulation_steps=2).epoch(1))
    ranks = [list(made(augment=augment, world=World(rank, 2)).epoch(1)) for rank in range(2)]
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 6
    for step, first, second in zip(one, *ranks, strict=True):
        assert_same(step, [*first, *second])


def test_the_fast_way_for_small_pictures_gives_what_the_slow_one_gives(monkeypatch):
    fast = made()
    monkeypatch.setattr(module, "MOST_BYTES", 0)
    slow = made()
    assert fast.small and not slow.small
    for one, other in zip(fast.epoch(0), slow.epoch(0), strict=True):
        assert torch.allclose(one[0].images, other[0].images, atol=1e-6)
        assert torch.equal(one[0].targets, other[0].targets)
    for one, other in zip(fast.sample(3), slow.sample(3), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_crops_are_windows_of_the_bordered_picture_and_some_are_mirrored():
    levels = torch.arange(1, 1 + 3 * 16, dtype=torch.uint8).view(1, 3, 4, 4)
    recipe = Augmentation(crop="padded", padding=1)
    bordered = torch.nn.functional.pad(levels, (1, 1, 1, 1))[0]
    windows = [bordered[:, y : y + 4, x : x + 4] for y in range(3) for x in range(3)]
    seen = set()
    for draw in torch.rand(200, 3, dtype=torch.float64):
        crop = crop_and_flip(levels, recipe, draw[None])[0]
        mirrored = draw[2] < 0.5
        crop = crop.flip(-1) if mirrored else crop
        (place,) = [number for number, window in enumerate(windows) if torch.equal(window, crop)]
        seen.add((place, bool(mirrored)))
    assert len(seen) == 18
    assert torch.equal(crop_and_flip(levels, PLAIN, torch.full((1, 3), 0.999)), levels)


def test_augmentation_is_new_in_every_epoch_and_leaves_the_global_random_state_alone():
    data = made(augment=Augmentation(auto_augment="rand-m9-mstd0.5", erase=0.3, mixup=0.5))
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, again, other = (next(data.epoch(n))[0] for n in (0, 0, 1))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (states[0], states[2])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.equal(first.images, again.images) and not torch.equal(first.images, other.images)
    assert first.targets.shape == (4, 3) and torch.allclose(first.targets.sum(1), torch.ones(4))


def test_unreadable_pictures_are_replaced_on_the_slow_way_and_left_out_on_the_fast_one():
    slow = made(pictures=Noise(50, broken=[7]), max_unreadable=0.1, augment=Augmentation(crop="resized"))
    assert all(len(micro.images) == 4 == len(micro.targets) for step in slow.epoch(0) for micro in step)
    assert slow.limit.names == ["7.png"]
    fast = made(pictures=Noise(50, broken=[7, 8, 9]), max_unreadable=0.1)
    assert fast.count == 47 and fast.steps == 11
    with pytest.raises(SwinQuantError, match="3 of 50 pictures are unreadable"):
        made(pictures=Noise(50, broken=[7, 8, 9]))
    with pytest.raises(SwinQuantError, match="all 4 pictures of a training batch are unreadable"):
        all_broken = Noise(8, broken=range(4))
        data = made(pictures=all_broken, max_unreadable=0.5, augment=Augmentation(crop="resized"))
        for number in range(100):
            list(data.epoch(number))


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"count": 3}, "3 training pictures do not fill one step of 4 pictures x 1 .* x 1 ranks"),
        ({"count": 7, "accumulation_steps": 2}, "do not fill one step"),
        ({"batch_size": 3, "augment": Augmentation(crop="none", mixup=1.0)}, "must be even"),
        ({"augment": Augmentation(auto_augment="no-such-policy")}, "timm refuses 'no-such-policy'"),
    ],
)
def test_an_impossible_epoch_or_augmentation_is_refused(keys, says):
    with pytest.raises(UsageError, match=says):
        made(**keys)


@pytest.mark.parametrize("small", [True, False])
def test_validation_holds_every_picture_once_over_all_ranks(monkeypatch, small):
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 30 if small else 0)
    ranks = [ValidationBatches(Noise(23), PREPROCESS, 4, World(rank, 3), 0) for rank in range(3)]
    found = [index for rank in ranks for batch in rank for index in which(batch.images)]
    assert sorted(found) == list(range(23))
    for batch in ranks[0]:
        expected = torch.stack([PREPROCESS(Noise(23).read(index)) for index in batch.indices])
        assert torch.allclose(batch.images, expected, atol=1e-6)
