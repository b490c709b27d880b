"""Turn a picture into the model's input: the evaluation transform, and FasterTransformer's training crops."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from swin_quant.base.compat import import_augmentation, import_torchvision
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.schema import allow, check_fields, checked, plain, within
from swin_quant.config.sides import shortest, shown, sides
from swin_quant.data.sampling import seeded

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "hamming", "box", "nearest")
UNPREPARED = (
    "how a picture becomes its input is not known: give `preprocess` to `sq.wrap`, or float tensors instead of pictures"
)
_LARGEST = 1e6  # mean and std: beyond every scale of pictures
MAX_SIZE = 4096
CROP_RATIO = 224 / 256
SQUARE, FLOORED, SQUASHED, SHORTER, WHOLE = SHAPES = ("square", "floored", "squashed", "shorter", "whole")
_Mean = Annotated[float, within(least=-_LARGEST, most=_LARGEST)]
_Side = Annotated[int, within(least=1, most=MAX_SIZE)]
_Std = Annotated[float, within(above=0, most=_LARGEST)]


@dataclass(frozen=True)
class Preprocess:
    """The evaluation transform (docs/reference, section 2.5); it travels with the checkpoint in the run card.

    Attributes:
        size: side of the square input, in pixels, or height and width.
        crop: resize the shorter side to int(size / crop_ratio) and crop the centre; False resizes to size x size. For
            height and width, resize until the picture covers both sides / crop_ratio, as timm does.
        interpolation: one of INTERPOLATIONS.
        mean, std: for the RGB channels, on a scale of 0 to 1.
        crop_ratio: side of the crop / side of the picture: Microsoft's 224 / 256, timm's crop_pct.
        shape: square is as above, with the crop's offset rounded half to even, as torchvision does; floored rounds it
            down, as transformers does; squashed resizes both sides to int(size / crop_ratio). For models that take any
            size: shorter resizes the shorter side to size without a crop, whole changes nothing.
        upright: turn pictures as their EXIF says, which cameras write; the decoder does it.

    Raises:
        UsageError: a field has the wrong type or is out of range.
    """

    size: _Side | tuple[_Side, _Side]
    crop: bool
    interpolation: Annotated[str, allow(INTERPOLATIONS)]
    mean: tuple[_Mean, _Mean, _Mean]
    std: tuple[_Std, _Std, _Std]
    crop_ratio: Annotated[float, within(least=0.5, most=1)] = CROP_RATIO
    shape: Annotated[str, allow(SHAPES)] = SQUARE
    upright: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", shortest(self.size))
        check_fields(self)
        if self.shape == SHORTER and not isinstance(self.size, int):
            raise UsageError(f"size {shown(self.size)}: must be one side for shape {SHORTER}")

    @classmethod
    def from_config(cls, cfg: Any) -> "Preprocess":
        """Take DATA.IMG_SIZE, INTERPOLATION, MEAN, STD and UPRIGHT, TEST.CROP, CROP_RATIO and SHAPE; or UsageError."""
        data, test = cfg.DATA, cfg.TEST
        try:
            mean, std, size = tuple(data.MEAN), tuple(data.STD), data.IMG_SIZE
            size = size if isinstance(size, int) else tuple(size)
            rest = test.CROP_RATIO, test.SHAPE, data.UPRIGHT
            return cls(size, test.CROP, data.INTERPOLATION, mean, std, *rest)
        except UsageError as error:
            keys = "DATA.IMG_SIZE, DATA.MEAN, DATA.STD, DATA.UPRIGHT, TEST.CROP, TEST.CROP_RATIO, TEST.SHAPE or "
            keys += "DATA.INTERPOLATION"
            raise UsageError(f"{keys}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Read the output of `to_dict`, from JSON or not. SwinQuantError for any other keys or values, and for none."""
        if values == {}:
            raise SwinQuantError(UNPREPARED)
        try:
            return checked(cls, values, "preprocess")
        except UsageError as error:  # fields that do not fit each other
            raise SwinQuantError(f"preprocess: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON; fields that older cards lack are written only if they differ from the default."""
        usual = {"crop_ratio": CROP_RATIO, "shape": SQUARE, "upright": False}
        return {key: value for key, value in plain(asdict(self)).items() if key not in usual or value != usual[key]}

    @property
    def is_square(self) -> bool:
        """Whether all pictures get the same size; otherwise a batch holds one picture."""
        return self.shape in (SQUARE, FLOORED, SQUASHED)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the model's input."""
        return sides(self.size)

    @property
    def resized(self) -> int | list[int] | None:
        """The size before any crop: the shorter side, height and width, or None without resizing."""
        if not self.is_square:
            return self.sides[0] if self.shape == SHORTER else None
        height, width = (int(side / self.crop_ratio) if self.crop else side for side in self.sides)
        return height if self.crop and self.shape != SQUASHED and height == width else [height, width]

    @property
    def covers(self) -> bool:
        """Whether a picture keeps its shape, and `resized` is the least height and width that it gets."""
        return self.crop and self.shape != SQUASHED and isinstance(self.resized, list)

    def pixels(self, images: Tensor) -> Tensor:
        """The pixels, uint8 [B, H, W, 3], that normalise to `images` [B, 3, H, W]; other values are rounded."""
        wide = images.detach().double()
        mean, std = (wide.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        values = ((wide * std + mean) * 255).round().clamp(0, 255)
        return values.to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def normalised(self, pixels: Tensor) -> Tensor:
        """Pixels, uint8 [B, H, W, 3], as the model takes them: float32 [B, 3, H, W]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std

    def __call__(self, image: Image.Image, index: int = 0) -> Tensor:
        """Map an RGB picture to float32 [3, *sides], or [3, H, W] of any size; `index` is ignored."""
        return _evaluation(self)(image)


@dataclass(frozen=True)
class Augment:
    """timm's training transform for pictures of the sides and orientation of `preprocess`, with random draws.

    The draws depend only on `seeds` and the picture's index: they are the same on any worker, rank and batch.

    Attributes:
        preprocess: The evaluation transform, whose size, interpolation and normalisation it shares.
        options: Further arguments of timm's `create_transform`.
        seeds: The key of the draws.
        border: Crop the resized picture after adding so many pixels on each side; None: timm's random resized crop.
    """

    preprocess: Preprocess
    options: tuple[tuple[str, Any], ...]
    seeds: tuple[int | str, ...]
    border: int | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of its output."""
        return self.preprocess.sides

    @property
    def upright(self) -> bool:
        """Whether to turn pictures as their EXIF says."""
        return self.preprocess.upright

    def __call__(self, image: Image.Image, index: int = 0) -> Tensor:
        """Map an RGB picture to float32 [3, *sides]; the global random states stay unchanged."""
        with seeded(*self.seeds, index):
            return _training(self.preprocess, self.options, self.border)(image)

    def checked(self, what: str) -> "Augment":
        """This transform. UsageError, which begins with `what`, if timm refuses its options."""
        try:
            _training(self.preprocess, self.options, self.border)
        except Exception as error:  # timm checks these strings with asserts and look-ups
            raise UsageError(f"{what}: {error!r}") from error
        return self


Transform: TypeAlias = Preprocess | Augment


def augmented(cfg: Any, seed: int = 0) -> Augment:
    """FasterTransformer's training crops (section 2.3), by DATA.* and AUG.* of the configuration. UsageError if timm
    refuses them."""
    aug = cfg.AUG
    options = {
        "auto_augment": None if aug.AUTO_AUGMENT in ("", "none") else aug.AUTO_AUGMENT,
        "color_jitter": aug.COLOR_JITTER,
        "re_prob": aug.REPROB,
        "re_mode": aug.REMODE,
        "re_count": aug.RECOUNT,
    }
    transform = Augment(Preprocess.from_config(cfg), tuple(options.items()), (seed,))
    return transform.checked("AUG.AUTO_AUGMENT, AUG.COLOR_JITTER or AUG.RE*: timm refuses them")


@lru_cache(maxsize=8)
def _evaluation(preprocess: Preprocess) -> Callable[[Image.Image], Tensor]:
    import_torchvision()
    from torchvision import transforms as tv

    method = tv.InterpolationMode(preprocess.interpolation)
    geometry: list[Callable[..., Any]] = []
    if preprocess.covers:
        geometry.append(partial(_covering, sides(preprocess.resized or 0), Image.Resampling[method.name]))
    elif preprocess.resized is not None:
        geometry.append(tv.Resize(preprocess.resized, method))
    if preprocess.is_square and preprocess.crop:
        floored = preprocess.shape == FLOORED
        geometry.append(partial(_floored_crop, preprocess.sides) if floored else tv.CenterCrop(preprocess.sides))
    return tv.Compose([*geometry, tv.ToTensor(), tv.Normalize(preprocess.mean, preprocess.std)])


def _covering(least: tuple[int, int], method: Image.Resampling, image: Image.Image) -> Image.Image:
    """The picture in the smallest size that covers this height and width, its shape kept."""
    ratio = min(image.height / least[0], image.width / least[1])
    return image.resize((round(image.width / ratio), round(image.height / ratio)), method)


def _floored_crop(sides: tuple[int, int], image: Image.Image) -> Image.Image:
    height, width = sides
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


@lru_cache(maxsize=8)
def _training(preprocess: Preprocess, options: tuple[tuple[str, Any], ...], border: int | None) -> Any:
    import_augmentation()
    from timm.data import create_transform
    from torchvision import transforms as tv

    how = {"interpolation": preprocess.interpolation, "mean": preprocess.mean, "std": preprocess.std, **dict(options)}
    transform: Any = create_transform(input_size=preprocess.sides, is_training=True, **how)
    if border is not None:  # as Microsoft for 32 x 32 pictures; the crop is first in timm's list
        geometry = tv.Resize(preprocess.sides, tv.InterpolationMode(preprocess.interpolation))
        transform.transforms[0] = tv.Compose([geometry, tv.RandomCrop(preprocess.sides, padding=border)])
    return transform
