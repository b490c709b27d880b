"""The bundled digits: real pictures with a fixed split."""

import numpy as np
import pytest

from swin_quant.data.sources import DigitsPictures


@pytest.fixture(scope="module")
def splits():
    return {split: DigitsPictures(split) for split in ("train", "val")}


def test_every_digit_is_in_exactly_one_split_and_four_fifths_train(splits):
    names = [*splits["train"].names, *splits["val"].names]
    assert len(names) == len(set(names)) == 1797
    assert len(splits["train"]) / 1797 == pytest.approx(0.8, abs=0.005)


def test_pictures_and_labels_are_scikit_learns(splits):
    from sklearn.datasets import load_digits  # its import would cost each worker a second

    digits = load_digits()
    for pictures in splits.values():
        for index in range(0, len(pictures), 100):
            source = int(pictures.names[index].split("/")[1])
            image = pictures.read(index)
            assert image.size == (8, 8) and image.mode == "RGB"
            assert abs(np.asarray(image)[..., 0] / 255 - digits.images[source] / 16).max() < 1 / 255
            assert pictures.labels[index] == digits.target[source]
