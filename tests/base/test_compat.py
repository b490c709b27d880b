"""timm and torchvision can be imported beside any build of torch, and their other faults are not hidden."""

import importlib

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base import compat


def test_the_missing_operators_are_declared_only_after_their_very_error(monkeypatch):
    """A CUDA wheel beside a CPU torch: the first import fails, the second finds the schemas."""
    declared, attempts = [], []

    class Library:
        def __init__(self, name, kind):
            declared.append((name, kind))

        def define(self, schema):
            declared.append(schema.partition("(")[0])

    def import_module(name):
        attempts.append(list(declared))
        if not declared:
            raise RuntimeError("operator torchvision::nms does not exist")
        return "the module"

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(compat.sys, "modules", dict(compat.sys.modules))
    monkeypatch.setattr(compat, "_declared", None)
    assert compat.import_torchvision() == "the module"
    assert declared == [("torchvision", "DEF"), "nms", "qnms"] and attempts[0] == []


def test_another_error_of_torchvision_is_not_hidden(monkeypatch):
    def broken(name):
        raise RuntimeError("libjpeg is of another version")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="libjpeg"):
        compat.import_torchvision()


@pytest.mark.parametrize("bits", [0, 1, 4, 8])
def test_a_picture_is_posterized_to_any_number_of_bits(bits):
    """RandAugment at full strength keeps no bits, which Pillow 13 refuses: one picture in hundreds ended a training."""
    table = compat.import_augmentation().auto_augment.NAME_TO_OP
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5)
    done = np.asarray(table["PosterizeIncreasing"](picture, bits))
    np.testing.assert_array_equal(done, np.asarray(picture) & (256 - 2 ** (8 - bits)))
    compat.import_augmentation()  # twice is once
    assert np.asarray(table["PosterizeIncreasing"](picture, bits)).tolist() == done.tolist()
