"""Training pictures and their augmentation, each draw under its own key.

Large pictures go through timm's transforms. Small ones are decoded once to uint8 and cropped and flipped as tensors, so
that the model is the cost. timm's Mixup mixes batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from swin_quant.base.compat import import_augmentation, import_timm, import_torchvision
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.train.recipe import Augmentation
from swin_quant.train.seeds import key_of, seeded


@dataclass(frozen=True)
class TrainingTransform:
    """Crop, flip, RandAugment or AutoAugment, colour jitter, normalisation, random erasing, in timm's order.

    The draws depend on the seed, the epoch and the picture's index alone.
    """

    recipe: Augmentation
    preprocess: Preprocess
    seed: int
    epoch: int

    @property
    def size(self) -> int:
        return self.preprocess.size

    @property
    def upright(self) -> bool:
        return self.preprocess.upright

    def __call__(self, image: Image.Image, index: int = 0) -> Tensor:
        """Map an RGB picture to float32 [3, size, size]; the global random states stay unchanged."""
        with seeded(self.seed, "picture", self.epoch, index):
            return _timm_transform(self.recipe, self.preprocess)(image)


def check_augmentation(recipe: Augmentation, preprocess: Preprocess) -> None:
    """UsageError if timm refuses the recipe's augmentation."""
    try:
        _timm_transform(recipe, preprocess)
    except Exception as error:  # timm checks these strings by asserts and look-ups of many kinds
        raise UsageError(f"augment: timm refuses {recipe.auto_augment or recipe.erase_mode!r}: {error!r}") from error


def needs_pictures(recipe: Augmentation) -> bool:
    """Whether the recipe has a step that `crop_and_flip` cannot do."""
    return bool(recipe.crop == "resized" or recipe.auto_augment or recipe.color_jitter or recipe.erase)


def make_mixup(recipe: Augmentation, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's Mixup/CutMix: images [B, ...] and labels [B] -> mixed images and targets [B, classes]; B must be even.

    The loss does the label smoothing.
    """
    if not recipe.mixup and not recipe.cutmix:
        return None
    import_timm()
    from timm.data import Mixup

    return Mixup(  # type: ignore[no-untyped-call]  # timm gives it no types
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mix_probability,
        switch_prob=recipe.mix_switch,
        mode=recipe.mix_mode,
        label_smoothing=0.0,
        num_classes=classes,
    )


@lru_cache(maxsize=8)
def _timm_transform(recipe: Augmentation, preprocess: Preprocess) -> Callable[[Any], Tensor]:
    import_torchvision()
    import_augmentation()
    from timm.data import create_transform
    from torchvision import transforms as tv

    transform = create_transform(
        input_size=preprocess.size,
        is_training=True,
        hflip=recipe.flip,
        color_jitter=recipe.color_jitter or None,  # type: ignore[arg-type]  # its default is not what None means
        auto_augment=recipe.auto_augment,
        re_prob=recipe.erase,
        re_mode=recipe.erase_mode,
        re_count=recipe.erase_count,
        interpolation=preprocess.interpolation,
        mean=preprocess.mean,
        std=preprocess.std,
    )
    if recipe.crop != "resized":  # as Microsoft does for 32 x 32 pictures; the crop is the first in timm's list
        geometry = tv.Resize((preprocess.size,) * 2, tv.InterpolationMode(preprocess.interpolation))
        border = recipe.padding if recipe.crop == "padded" else 0
        transform.transforms[0] = tv.Compose([geometry, tv.RandomCrop(preprocess.size, padding=border)])
    return transform


MOST_BYTES = 1 << 30
_TOGETHER = 256


@dataclass(frozen=True)
class SmallPictures:
    """All readable pictures of a split after the evaluation's resizing: levels uint8 [N, 3, S, S], labels int64 [N]."""

    levels: Tensor
    labels: Tensor
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.labels)

    def normalised(self, levels: Tensor) -> Tensor:
        """uint8 [B, 3, S, S] -> float32, normalised as in evaluation."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.preprocess.mean, self.preprocess.std))
        return levels.float().div_(255).sub_(mean).div_(std)

    def batches(self, indices: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Batches as of `load_batches`, without augmentation."""
        for part in indices:
            yield Batch(self.normalised(self.levels[list(part)]), self.labels[list(part)], list(part), [])


def is_small(pictures: Pictures, size: int) -> bool:
    """Whether all pictures at `size` x `size` fit into MOST_BYTES."""
    return len(pictures) * 3 * size**2 <= MOST_BYTES


def decode_all(pictures: Pictures, preprocess: Preprocess, limit: UnreadableLimit, workers: int) -> SmallPictures:
    """Read every picture; unreadable ones are counted in `limit` and left out."""
    geometry = replace(preprocess, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    parts = chunks(range(len(pictures)), _TOGETHER)
    levels, labels = [], []
    for batch in track(load_batches(pictures, geometry, parts, workers), "decoding", len(parts)):
        limit.count(batch.unreadable)
        limit.check()
        levels.append(batch.images.mul_(255).round_().to(torch.uint8))  # exact: these were uint8 before ToTensor
        labels.append(batch.labels)
    return SmallPictures(torch.cat(levels), torch.cat(labels), preprocess)


def crop_and_flip(levels: Tensor, recipe: Augmentation, draws: Tensor) -> Tensor:
    """Crop S x S pixels out of each picture of [B, 3, S, S] with a black border, and mirror some.

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


def epoch_draws(count: int, seed: int, epoch: int) -> Tensor:
    """float64 [count, 3]: the draws of each picture's crop and flip in an epoch, on any rank."""
    generator = torch.Generator().manual_seed(key_of(seed, "crops", epoch))
    return torch.rand(count, 3, generator=generator, dtype=torch.float64)
