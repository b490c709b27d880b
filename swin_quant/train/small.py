"""Small pictures, decoded once: uint8 in memory, cropped and flipped as tensors, so that the model is what costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.train.recipe import Augmentation
from swin_quant.train.seeds import key_of

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
        """uint8 [B, 3, S, S] -> float32, as the evaluation's preprocessing gives it."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.preprocess.mean, self.preprocess.std))
        return levels.float().div_(255).sub_(mean).div_(std)

    def batches(self, indices: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Batches as `load_batches` gives them, untransformed."""
        for part in indices:
            yield Batch(self.normalised(self.levels[list(part)]), self.labels[list(part)], list(part), [])


def is_small(pictures: Pictures, size: int) -> bool:
    """Whether all pictures at `size` x `size` fit into MOST_BYTES."""
    return len(pictures) * 3 * size**2 <= MOST_BYTES


def decode_all(pictures: Pictures, preprocess: Preprocess, limit: UnreadableLimit, workers: int) -> SmallPictures:
    """Read every picture; those that are unreadable are counted in `limit` and left out."""
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
    """Crop each picture of [B, 3, S, S] out of itself with a black border, and mirror some, by draws [B, 3] in [0, 1).

    The draws decide row, column and mirroring; the crop has S x S pixels again.
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
    """float64 [count, 3]: what each picture's crop and flip of an epoch are decided by, whoever loads it."""
    generator = torch.Generator().manual_seed(key_of(seed, "crops", epoch))
    return torch.rand(count, 3, generator=generator, dtype=torch.float64)
