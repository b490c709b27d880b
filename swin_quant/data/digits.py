"""The handwritten digits that come with scikit-learn: real pictures for the demo, without a download."""

from itertools import count

import numpy as np
from PIL import Image

from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.data.pictures import Pictures

SPLITS = ("train", "val")
_VAL_EVERY = 5  # every fifth picture of each class is for validation


class DigitsPictures(Pictures):
    """1,797 pictures of 8 x 8 grey levels in ten classes, 80 % `train`, 20 % `val`, the classes balanced in both.

    Source: UCI "Optical Recognition of Handwritten Digits", as bundled with scikit-learn.
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise UsageError(f"digits: no split {split!r}; choose one of {', '.join(SPLITS)}")
        digits = library("sklearn.datasets", "demo").load_digits()
        ordinals = [count() for _ in digits.target_names]
        of_class = np.array([next(ordinals[label]) for label in digits.target])
        chosen = np.flatnonzero((of_class % _VAL_EVERY == _VAL_EVERY - 1) == (split == "val"))
        self._levels = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # 0 to 16 -> 0 to 255
        self.names = [f"digits/{index:04d}" for index in chosen]
        self.labels = digits.target[chosen].tolist()
        self.class_names = [str(name) for name in digits.target_names]

    def open(self, index: int) -> Image.Image:
        """Return one picture, 8 x 8, mode L."""
        return Image.fromarray(self._levels[index])
