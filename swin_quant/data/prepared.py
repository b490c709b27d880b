"""Check that tensors are prepared: float, normalised pictures [B, channels, H, W], or the model's other inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.data.preprocess import Preprocess

_PIXELS = "model.preprocess.normalised({})"
_CHANNELS_LAST = "images.permute(0, 2, 3, 1)"
_FAR = 8  # times the largest value of a normalised picture; pictures and random numbers stay below
_MANY = 0.25  # share of values out of range: normal random numbers have fewer


@dataclass
class Prepared:
    """Checks batches for a model with this `preprocess` (None: unknown); values are checked only in the first batch.

    `shape`: one input of the model, channels first; None: pictures of unknown channels. `takes_pixels`: uint8 [B, H, W,
    channels] is allowed too, unchecked.
    """

    preprocess: Preprocess | None
    shape: tuple[int, ...] | None = None
    looked: bool = False
    takes_pixels: bool = False

    def __call__(self, images: Tensor) -> None:
        """UsageError, with the right call, for tensors that cannot be prepared pictures; a warning in doubt."""
        if self.takes_pixels and images.dtype == torch.uint8:
            return
        first, self.looked = not self.looked, True
        if problem := fault(images, self.preprocess, self.shape, first):
            raise UsageError(problem)
        if first and (guess := doubt(images, self.preprocess)):
            log.warning("%s", guess)


def fault(
    images: Tensor, preprocess: Preprocess | None, wanted: tuple[int, ...] | None = None, ranges: bool = True
) -> str:
    """The reason why `images` cannot be prepared pictures, with the remedy; or empty.

    `wanted`: the shape of one input, if known. `ranges`: check values too.
    """
    shape, channels = list(images.shape), wanted[0] if wanted else 3 if preprocess else None
    if wanted and len(wanted) != 3:
        if tuple(shape[1:]) != wanted or not images.is_floating_point():
            actual = f"{str(images.dtype).removeprefix('torch.')} {shape}"
            return f"inputs are {actual}: must be float [B, {', '.join(map(str, wanted))}]"
        return ""
    if images.dim() != 4:
        return f"images {shape}: must be [B, {channels or 'channels'}, H, W]; one picture is images[None]"
    is_last = channels is not None and shape[1] != channels and shape[3] == channels
    if not images.is_floating_point():
        right = _PIXELS.format("images" if is_last else _CHANNELS_LAST) if preprocess else "them as float, normalised"
        return f"images are {str(images.dtype).removeprefix('torch.')}, not normalised: give {right}"
    if is_last:
        return f"images {shape} have their channels last: give images.permute(0, 3, 1, 2)"
    if ranges and preprocess and images.numel():
        least, most = _range(images)
        if 0 <= least and _FAR * max(1.0, _normal(preprocess)[1]) < most <= 255:
            right = _PIXELS.format(_CHANNELS_LAST)
            return f"images are from {least:.3g} to {most:.3g}, pixels that are not normalised: give {right}"
    return ""


def doubt(images: Tensor, preprocess: Preprocess | None) -> str:
    """The reason to doubt that `images` are normalised by `preprocess`, with the remedy; or empty."""
    if not preprocess or not images.numel():
        return ""
    (least, most), (low, high) = _range(images), _normal(preprocess)
    span = f"images are from {least:.3g} to {most:.3g}, and normalised ones from {low:.3g} to {high:.3g}"
    if 0 <= least < most <= 1 and low < -0.5:
        right = _PIXELS.format(f"255 * {_CHANNELS_LAST}")
        return f"{span}: if they are pixels / 255, give {right}"
    if low - 0.01 <= least and most <= high + 0.01:
        return ""
    outside = ((images < low - 0.01) | (images > high + 0.01)).float().mean().item()
    if outside < _MANY:
        return ""
    pairs = list(zip(preprocess.mean, preprocess.std, strict=True))
    lowest, highest = min((low - mean) / std for mean, std in pairs), max((high - mean) / std for mean, std in pairs)
    if lowest - 0.01 <= least and most <= highest + 0.01:
        return f"{span}: if they are normalised twice, leave one out"
    return f"{span}: prepare them as its `preprocess` says" if max(-least, most) > _FAR * max(-low, high) else ""


def _normal(preprocess: Preprocess) -> tuple[float, float]:
    """The least and the largest value of a normalised picture."""
    pairs = list(zip(preprocess.mean, preprocess.std, strict=True))
    return min(-mean / std for mean, std in pairs), max((1 - mean) / std for mean, std in pairs)


def _range(images: Tensor) -> tuple[float, float]:
    least, most = torch.aminmax(images.detach())
    return least.item(), most.item()
