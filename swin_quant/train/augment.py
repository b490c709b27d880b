"""Training pictures by timm's transforms, and batches mixed by timm's Mixup, each under a key of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image
from torch import Tensor

from swin_quant.base.compat import import_augmentation, import_timm, import_torchvision
from swin_quant.base.errors import UsageError
from swin_quant.data.preprocess import Preprocess
from swin_quant.train.recipe import Augmentation
from swin_quant.train.seeds import seeded


@dataclass(frozen=True)
class TrainingTransform:
    """Crop, flip, RandAugment or AutoAugment, colour jitter, normalisation, random erasing, in timm's order.

    What is drawn depends on the seed, the epoch and the picture's index alone.
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
        """Map an RGB picture to float32 [3, size, size]; the global random states are left as they were."""
        with seeded(self.seed, "picture", self.epoch, index):
            return _timm_transform(self.recipe, self.preprocess)(image)


def check_augmentation(recipe: Augmentation, preprocess: Preprocess) -> None:
    """UsageError if timm refuses what the recipe asks for."""
    try:
        _timm_transform(recipe, preprocess)
    except Exception as error:  # timm checks these strings by assert, key and attribute look-ups
        raise UsageError(f"augment: timm refuses {recipe.auto_augment or recipe.erase_mode!r}: {error!r}") from error


def needs_pictures(recipe: Augmentation) -> bool:
    """Whether anything is asked for that `small.crop_and_flip` does not do."""
    return bool(recipe.crop == "resized" or recipe.auto_augment or recipe.color_jitter or recipe.erase)


def make_mixup(recipe: Augmentation, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's Mixup/CutMix: images [B, ...] and labels [B] -> mixed images and targets [B, classes]; B must be even.

    Label smoothing is left to the loss.
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
    if recipe.crop != "resized":  # as Microsoft does for pictures of 32 x 32: the crop comes first in timm's list
        geometry = tv.Resize((preprocess.size,) * 2, tv.InterpolationMode(preprocess.interpolation))
        border = recipe.padding if recipe.crop == "padded" else 0
        transform.transforms[0] = tv.Compose([geometry, tv.RandomCrop(preprocess.size, padding=border)])
    return transform
