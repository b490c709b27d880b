"""A checkpoint as timm's train.py writes it with default arguments, at a published size."""

from argparse import Namespace

import pytest
import torch

import swin_quant as sq
from swin_quant.base.compat import import_timm

NAME = "swin_tiny_patch4_window7_224"


@pytest.mark.slow
def test_empty_arguments_of_a_trainer_are_no_statement(tmp_path):
    """`--interpolation` is '' by default there, which means the model's own."""
    model = import_timm().create_model(NAME, num_classes=37).eval()
    unset = dict.fromkeys(("img_size", "input_size", "crop_pct", "mean", "std"))
    args = Namespace(model=NAME, num_classes=37, interpolation="", model_kwargs={}, **unset)
    saved = {"epoch": 1, "arch": NAME, "state_dict": model.state_dict(), "version": 2, "args": args}
    torch.save(saved, tmp_path / "last.pth.tar")
    loaded = sq.load(tmp_path / "last.pth.tar")
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected, found = model(images), loaded.module(images)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert loaded.config.DATA.INTERPOLATION == "bicubic"
