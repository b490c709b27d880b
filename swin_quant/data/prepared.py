"""Make a model's input: check that tensors are prepared (float, normalised pictures [B, channels, H, W], or the model's
other inputs), and preprocess pictures."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log, track
from swin_quant.config.sides import shown
from swin_quant.data.folder import collect_pictures
from swin_quant.data.inputs import Inputs, said
from swin_quant.data.preprocess import UNPREPARED, Preprocess
from swin_quant.data.sampling import chunks

_PIXELS = "model.preprocess.normalised({})"
_CHANNELS_LAST = "images.permute(0, 2, 3, 1)"
_FAR = 8  # times the largest value of a normalised picture; pictures and random numbers stay below
_MANY = 0.25  # share of values out of range: normal random numbers have fewer
_LOOKED_AT = 2**16  # values of a batch, of which that share is taken
_PIECE = 32  # pictures prepared at a time


@dataclass
class Prepared:
    """Makes inputs of whatever a model with this `preprocess` (None: unknown) is called with.

    Tensors and arrays of float are taken as preprocessed: they are checked, with one warning at most. Pictures
    (files, folders, PIL's, pixels uint8 [B, H, W, 3] or [H, W, 3], or a list of these) go through `preprocess`.
    `shape`: one input of the model, channels first; None: pictures of unknown channels. `takes_pixels`: uint8 [B, H,
    W, 3] of the model's size goes in as it is. `inputs`: several by name, which are packed. `took`: which of these the
    latest input was, in words.
    """

    preprocess: Preprocess | None
    shape: tuple[int, ...] | None = None
    has_warned: bool = False
    takes_pixels: bool = False
    took: str = ""
    inputs: Inputs | None = None

    @property
    def known(self) -> Preprocess:
        """`preprocess`. UsageError where nobody said."""
        if self.preprocess is None:
            raise UsageError(UNPREPARED)
        return self.preprocess

    def __call__(self, given: Any) -> Tensor:
        """The input [B, channels, H, W], float32. UsageError for what can be none, with the right call; a warning in
        doubt. UnreadablePicture for the first that cannot be read."""
        parts = list(self.batches(given))
        if len({part.shape[1:] for part in parts}) > 1:
            raise UsageError("images become inputs of several sizes: give each size as a batch of its own")
        return torch.cat(parts)

    def batches(self, given: Any, most: int | None = None) -> Iterator[Tensor]:
        """The input in parts: tensors whole, pictures in batches of `most`."""
        if self.inputs:
            self.took = "inputs by name: taken as preprocessed"
            yield self.inputs.pack(given)
            return
        whole = f", {', '.join(map(str, self.known.sides))}, 3]" if self.takes_pixels else None
        if whole and said(given).startswith("uint8 [") and said(given).endswith(whole):
            self.took = "pixels of the file's size: taken as they are"
            yield torch.as_tensor(given)
        elif pictures := collect_pictures(given):
            known = self.known
            self.took = f"pictures: preprocessed as the run card says ({shown(known.size)}, {known.interpolation})"
            parts = chunks(range(len(pictures)), most or _PIECE if known.is_square else 1)
            for part in track(parts, "running", len(parts), "batches") if len(parts) > 1 else parts:
                yield torch.stack([known(pictures.read(index, known.upright)) for index in part])
        else:
            images = _tensor(given, self.shape)
            if problem := fault(images, self.preprocess, self.shape):
                raise UsageError(problem)
            if not self.has_warned and (guess := doubt(images, self.preprocess)):
                self.has_warned = True
                log.warning("%s", guess)
            self.took = "tensors of float: taken as preprocessed"
            yield images.float()


def _tensor(given: Any, shape: tuple[int, ...] | None) -> Tensor:
    """Tensors and arrays, or a list of those of one input each, as a tensor. UsageError for anything else."""
    items = given if isinstance(given, list | tuple) else [given]
    if items and all(isinstance(item, Tensor | np.ndarray) for item in items):
        with contextlib.suppress(TypeError, RuntimeError):  # numpy's types that torch lacks; shapes that differ
            tensors = [torch.as_tensor(item) for item in items]
            return tensors[0] if items is not given else torch.stack(tensors)
    came = " and ".join(sorted({said(item) for item in items})) or "empty"
    came = came if items is not given else f"a list of {came}" if items else "an empty list"
    wanted = ", ".join(map(str, shape)) if shape else "3, H, W"
    raise UsageError(
        f"images are {came}: give float [B, {wanted}], preprocessed, or pictures: files, folders, PIL's, uint8 "
        "[B, H, W, 3] or a list of one of these"
    )


def fault(images: Tensor, preprocess: Preprocess | None, wanted: tuple[int, ...] | None = None) -> str:
    """The reason why `images` cannot be prepared pictures, with the remedy; or empty. `wanted`: the shape of one input,
    if known."""
    shape, channels = list(images.shape), wanted[0] if wanted else 3 if preprocess else None
    if wanted and len(wanted) != 3:
        if tuple(shape[1:]) != wanted or not images.is_floating_point():
            return f"inputs are {said(images)}: must be float [B, {', '.join(map(str, wanted))}]"
        return ""
    if images.dim() != 4:
        return f"images {shape}: must be [B, {channels or 'channels'}, H, W]; one picture is images[None]"
    is_last = channels is not None and shape[1] != channels and shape[3] == channels
    if not images.is_floating_point():
        right = _PIXELS.format("images" if is_last else _CHANNELS_LAST) if preprocess else "them as float, normalised"
        return f"images are {str(images.dtype).removeprefix('torch.')}, not normalised: give {right}"
    if is_last:
        return f"images {shape} have their channels last: give images.permute(0, 3, 1, 2)"
    if preprocess and images.numel():
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
    some = images.flatten()[:: max(images.numel() // _LOOKED_AT, 1)]
    if ((some < low - 0.01) | (some > high + 0.01)).float().mean().item() < _MANY:
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


def _range(images: Tensor) -> list[float]:
    return [end.item() for end in torch.aminmax(images.detach())]
