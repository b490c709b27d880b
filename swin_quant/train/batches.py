"""Training data: the pictures of every step of every epoch, on any number of ranks, from any position.

An epoch is one seeded order of all pictures, or its first `epoch_pictures`, cut into micro-batches. A step takes the
next `accumulation * world` micro-batches: two ranks see the same pictures in a step as one rank with twice the
accumulation, and every rank has the same number of steps. Pictures that do not fill a step are left out, other ones in
every epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks, sample, shard
from swin_quant.train.augment import (
    SmallPictures,
    TrainingTransform,
    check_augmentation,
    crop_and_flip,
    decode_all,
    epoch_draws,
    is_small,
    make_mixup,
    needs_pictures,
)
from swin_quant.train.recipe import Recipe
from swin_quant.train.seeds import key_of, seeded


@dataclass(frozen=True)
class MicroBatch:
    """images float32 [B, 3, S, S]; targets int64 [B], or float32 [B, classes] if mixed; `place`: the micro-batch's
    number in the epoch, over all ranks."""

    images: Tensor
    targets: Tensor
    place: int


class TrainingBatches:
    """The micro-batches of this rank. `steps` is the number of optimizer steps in an epoch, on every rank.

    Raises:
        UsageError: fewer pictures than one step needs, or an odd batch that Mixup cannot pair.
        SwinQuantError: too many pictures are unreadable.
    """

    def __init__(
        self,
        pictures: Pictures,
        recipe: Recipe,
        preprocess: Preprocess,
        classes: int,
        seed: int,
        world: World,
        workers: int,
        max_unreadable: float = 0.01,
    ) -> None:
        if recipe.batch_size is None:
            raise UsageError("batch_size is not set: say how many pictures a training batch has")
        self.pictures, self.recipe, self.preprocess, self.seed, self.world = pictures, recipe, preprocess, seed, world
        self.batch_size = recipe.batch_size
        self.workers = default_workers(workers, world.size, len(pictures) // world.size)
        self.limit = UnreadableLimit(len(pictures), max_unreadable)
        self.mixup = make_mixup(recipe.augment, classes)
        if self.mixup and self.batch_size % 2:
            raise UsageError(f"batch_size {self.batch_size}: must be even for Mixup and CutMix, which pair pictures")
        self.small: SmallPictures | None = None
        if needs_pictures(recipe.augment):
            check_augmentation(recipe.augment, preprocess)
        elif is_small(pictures, preprocess.size):
            self.small = decode_all(pictures, preprocess, self.limit, self.workers)
        self.count = len(self.small or pictures)
        self.step_pictures = self.batch_size * recipe.accumulation_steps * world.size
        taken = min(recipe.epoch_pictures or self.count, self.count)
        self.steps = taken // self.step_pictures
        if self.steps == 0:
            raise UsageError(
                f"{taken} training pictures do not fill one step of {recipe.batch_size} pictures x "
                f"{recipe.accumulation_steps} accumulation steps x {world.size} ranks: lower ‹batch›"
            )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step from step `start` of an epoch."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed(key_of(self.seed, "order", epoch))
        order = torch.randperm(self.count, generator=generator).tolist()
        per_step = recipe.accumulation_steps * self.world.size
        places = list(shard(range(start * per_step, self.steps * per_step), self.world.rank, self.world.size))
        parts = [order[place * self.batch_size : (place + 1) * self.batch_size] for place in places]
        loaded = self._small(self.small, parts, epoch) if self.small else self._large(parts, epoch)
        step: list[MicroBatch] = []
        for place, batch in zip(places, loaded, strict=True):
            step.append(self._mixed(batch, place, epoch))
            if len(step) == recipe.accumulation_steps:
                yield step
                step = []

    def sample(self, batches: int, size: int = 8) -> Iterator[Tensor]:
        """This rank's share of `batches` batches of training pictures, always the same, without augmentation."""
        order = sample(self.count, min(batches * size, self.count), self.seed)
        parts = [shard(part, self.world.rank, self.world.size) for part in chunks(order, size)]
        loaded = self.small.batches(parts) if self.small else load_batches(self.pictures, self.preprocess, parts)
        for batch in loaded:
            yield batch.images.to(self.world.device)

    def _small(self, small: SmallPictures, parts: list[list[int]], epoch: int) -> Iterator[Batch]:
        draws = epoch_draws(self.count, self.seed, epoch)
        for part in parts:
            levels = crop_and_flip(small.levels[part], self.recipe.augment, draws[part])
            yield Batch(small.normalised(levels), small.labels[part], part, [])

    def _large(self, parts: list[list[int]], epoch: int) -> Iterator[Batch]:
        transform = TrainingTransform(self.recipe.augment, self.preprocess, self.seed, epoch)
        for batch, part in zip(load_batches(self.pictures, transform, parts, self.workers), parts, strict=True):
            if batch.unreadable:
                self.limit.count(batch.unreadable)
                self.limit.check()
                batch = _filled(batch, len(part))
            yield batch

    def _mixed(self, batch: Batch, place: int, epoch: int) -> MicroBatch:
        images, targets = batch.images, batch.labels
        if self.mixup:
            with seeded(self.seed, "mix", epoch, place):
                images, targets = self.mixup(images, targets)
        return MicroBatch(images, targets, place)


class ValidationBatches:
    """This rank's share of the validation pictures, each exactly once; small pictures are decoded once."""

    def __init__(
        self,
        pictures: Pictures,
        preprocess: Preprocess,
        batch_size: int,
        world: World,
        workers: int,
        max_unreadable: float = 0.01,
    ) -> None:
        self.pictures, self.preprocess = pictures, preprocess
        self.workers = default_workers(workers, world.size, len(pictures) // world.size)
        self.limit = UnreadableLimit(len(pictures), max_unreadable)
        small = is_small(pictures, preprocess.size)
        self.small = decode_all(pictures, preprocess, self.limit, self.workers) if small else None
        count = len(self.small or pictures)
        passes = ceil(ceil(count / world.size) / batch_size)  # equal on all ranks: a forward pass may be collective
        mine = shard(range(count), world.rank, world.size)
        self.parts = [part.tolist() for part in np.array_split(mine, passes)]

    def __iter__(self) -> Iterator[Batch]:
        if self.small:
            yield from self.small.batches(self.parts)
            return
        for batch in load_batches(self.pictures, self.preprocess, self.parts, self.workers):
            self.limit.count(batch.unreadable)
            self.limit.check()
            yield batch


def _filled(batch: Batch, size: int) -> Batch:
    """A full batch of `size` pictures: readable ones replace the unreadable, so that no rank runs dry."""
    if not len(batch.labels):
        raise SwinQuantError(f"all {size} pictures of a training batch are unreadable, {batch.unreadable[0]} first")
    places = torch.arange(size) % len(batch.labels)
    return Batch(batch.images[places], batch.labels[places], [batch.indices[place] for place in places], [])
