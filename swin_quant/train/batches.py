"""Training data: the pictures of every step of every epoch, on any number of ranks, from any position.

An epoch is one seeded order of all pictures, or its first `epoch_pictures`, cut into micro-batches. A step takes the
next `accumulation * world` micro-batches: two ranks see the same pictures in a step as one rank with twice the
accumulation, and every rank has the same number of steps. Pictures that do not fill a step are left out; they differ
from epoch to epoch.

Large pictures go through timm's transforms, with a random key for each picture and epoch. Small ones are decoded once
to uint8 and cropped and flipped as tensors, so that loading costs less than the model. timm's Mixup mixes batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.compat import import_timm
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Augment, Preprocess
from swin_quant.data.sampling import chunks, compute_key, sample, seeded, shard
from swin_quant.train.recipe import Augmentation, Recipe


def augment_by(recipe: Augmentation, preprocess: Preprocess, *seeds: int | str) -> Augment:
    """Crop, flip, RandAugment or AutoAugment, colour jitter, normalisation and random erasing, in timm's order."""
    options = {
        "hflip": recipe.flip,
        "color_jitter": recipe.color_jitter or None,
        "auto_augment": recipe.auto_augment,
        "re_prob": recipe.erase,
        "re_mode": recipe.erase_mode,
        "re_count": recipe.erase_count,
    }
    border = None if recipe.crop == "resized" else recipe.padding if recipe.crop == "padded" else 0
    return Augment(preprocess, tuple(options.items()), seeds, border)


MOST_BYTES = 1 << 30  # all small pictures, decoded in memory
_TOGETHER = 256  # pictures decoded at a time


@dataclass(frozen=True)
class SmallPictures:
    """All readable pictures of a split, resized as in evaluation: levels uint8 [N, 3, S, S], labels int64 [N]."""

    levels: Tensor
    labels: Tensor
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: list[int], levels: Tensor | None = None) -> Batch:
        """The pictures at these indices, normalised as in evaluation; `levels`: theirs, changed."""
        pixels = (self.levels[indices] if levels is None else levels).permute(0, 2, 3, 1)
        return Batch(self.preprocess.normalised(pixels), self.labels[indices], indices, [])

    def batches(self, indices: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """The same batches as `load_batches`, without augmentation."""
        return (self.batch(list(part)) for part in indices)


def decode_if_small(
    pictures: Pictures, preprocess: Preprocess, limit: UnreadableLimit, workers: int
) -> SmallPictures | None:
    """Every readable picture, if all fit into MOST_BYTES; unreadable ones are counted in `limit` and left out."""
    if len(pictures) * 3 * prod(preprocess.sides) > MOST_BYTES:
        return None
    geometry = replace(preprocess, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    parts = chunks(range(len(pictures)), _TOGETHER)
    loaded = track(load_batches(pictures, geometry, parts, workers), "decoding", len(parts), "batches")
    levels, labels = [], []
    for batch in limit.watched(loaded):
        levels.append(batch.images.mul_(255).round_().to(torch.uint8))  # exact: these were uint8 before ToTensor
        labels.append(batch.labels)
    return SmallPictures(torch.cat(levels), torch.cat(labels), preprocess)


def crop_and_flip(levels: Tensor, recipe: Augmentation, draws: Tensor) -> Tensor:
    """Crop S x S pixels from each picture [B, 3, S, S] with a black border, and mirror some.

    The draws [B, 3] in [0, 1) decide row, column and mirroring.
    """
    side, border = levels.shape[-1], recipe.padding if recipe.crop == "padded" else 0
    padded = F.pad(levels, (border,) * 4)
    corner = (draws[:, :2] * (2 * border + 1)).long()
    run = torch.arange(side)
    rows = corner[:, :1] + run  # [B, S]
    mirrored = (draws[:, 2:] < recipe.flip).long()
    columns = corner[:, 1:] + mirrored * (side - 1 - run) + (1 - mirrored) * run
    pictures = torch.arange(len(levels))[:, None, None]
    return padded.permute(0, 2, 3, 1)[pictures, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


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
        augment, self.mixup = recipe.augment, None
        if augment.mixup or augment.cutmix:
            if self.batch_size % 2:
                what = "must be even for Mixup and CutMix, which pair pictures"
                raise UsageError(f"batch_size {self.batch_size}: {what}")
            import_timm()
            from timm.data import Mixup

            how = {"prob": augment.mix_probability, "switch_prob": augment.mix_switch, "mode": augment.mix_mode}
            # Images [B, ...] and labels [B] -> mixed images and targets [B, classes]; the loss smooths labels
            self.mixup = Mixup(  # type: ignore[no-untyped-call]  # timm gives it no types
                augment.mixup, augment.cutmix, label_smoothing=0.0, num_classes=classes, **how
            )
        self.small: SmallPictures | None = None
        if augment.crop == "resized" or augment.auto_augment or augment.color_jitter or augment.erase:
            refused = augment.auto_augment or augment.erase_mode
            augment_by(augment, preprocess).checked(f"augment: timm refuses {refused!r}")
        elif not recipe.epoch_pictures or recipe.epoch_pictures * recipe.epochs >= len(pictures):  # else few are read
            self.small = decode_if_small(pictures, preprocess, self.limit, self.workers)
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
        generator = torch.Generator().manual_seed(compute_key(self.seed, "order", epoch))
        order = torch.randperm(self.count, generator=generator).tolist()
        per_step = recipe.accumulation_steps * self.world.size
        places = list(shard(range(start * per_step, self.steps * per_step), self.world.rank, self.world.size))
        parts = [order[place * self.batch_size : (place + 1) * self.batch_size] for place in places]
        loaded = self._load(parts, epoch)
        step: list[MicroBatch] = []
        for place, batch in zip(places, loaded, strict=True):
            images, targets = batch.images, batch.labels
            if self.mixup:
                with seeded(self.seed, "mix", epoch, place):
                    images, targets = self.mixup(images, targets)
            step.append(MicroBatch(images, targets, place))
            if len(step) == recipe.accumulation_steps:
                yield step
                step = []

    def sample(self, batches: int, size: int = 8) -> Iterator[Tensor]:
        """A fixed sample of `batches` batches of training pictures without augmentation, the same on every rank."""
        order = sample(self.count, min(batches * size, self.count), self.seed)
        parts = chunks(order, size)
        loaded = self.small.batches(parts) if self.small else load_batches(self.pictures, self.preprocess, parts)
        for batch in loaded:
            yield batch.images.to(self.world.device)

    def _load(self, parts: list[list[int]], epoch: int) -> Iterator[Batch]:
        if self.small:
            generator = torch.Generator().manual_seed(compute_key(self.seed, "crops", epoch))  # the same on every rank
            draws = torch.rand(self.count, 3, generator=generator, dtype=torch.float64)
            for part in parts:
                yield self.small.batch(part, crop_and_flip(self.small.levels[part], self.recipe.augment, draws[part]))
            return
        transform = augment_by(self.recipe.augment, self.preprocess, self.seed, "picture", epoch)
        loaded = self.limit.watched(load_batches(self.pictures, transform, parts, self.workers))
        for batch, part in zip(loaded, parts, strict=True):
            if not len(batch.labels):
                first = batch.unreadable[0]
                raise SwinQuantError(f"all {len(part)} pictures of a training batch are unreadable, {first} first")
            if batch.unreadable:  # readable pictures take their places, so that all ranks have as many
                places = torch.arange(len(part)) % len(batch.labels)
                indices = [batch.indices[place] for place in places]
                batch = Batch(batch.images[places], batch.labels[places], indices, [])
            yield batch


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
        self.small = decode_if_small(pictures, preprocess, self.limit, self.workers)
        count = len(self.small or pictures)
        passes = ceil(ceil(count / world.size) / batch_size)  # equal on all ranks, for a forward pass may be collective
        mine = shard(range(count), world.rank, world.size)
        self.parts = [part.tolist() for part in np.array_split(mine, passes)]

    def __iter__(self) -> Iterator[Batch]:
        if self.small:
            yield from self.small.batches(self.parts)
            return
        yield from self.limit.watched(load_batches(self.pictures, self.preprocess, self.parts, self.workers))
