"""Classifiers of pictures that are not square: logits beside timm's, tables beside brute force, refusals in a line."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import swin_quant as sq
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import UsageError
from swin_quant.checkpoint import load_float
from swin_quant.config import from_dict
from swin_quant.config.sides import compute_map_size
from swin_quant.models import build_model
from swin_quant.models.geometry import read_geometry

CLASSES = {"swin": "SwinTransformer", "swinv2": "SwinTransformerV2"}
SHAPE = {"embed_dim": 16, "depths": (2, 2, 2), "num_heads": (1, 2, 4), "num_classes": 5}


def config(kind, size, window, **more):
    keys = {"EMBED_DIM": 16, "DEPTHS": [2, 2, 2], "NUM_HEADS": [1, 2, 4], "WINDOW_SIZE": window}
    keys |= {"PRETRAINED_WINDOW_SIZES": [0, 0, 0]} if kind == "swinv2" else {}
    model = {"TYPE": kind, "NUM_CLASSES": 5, "NAME": "oblong", kind.upper(): {**keys, **more}}
    return from_dict({"DATA": {"IMG_SIZE": size}, "MODEL": model}, "test")


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((192, 224), 7),  # no side holds whole windows: they are padded
        ((96, 64), 4),  # both do
        ((32, 224), 7),  # from the second stage on a window is higher than the map
        ((64, 48), 16),  # and here larger on both sides
    ],
)
@pytest.mark.parametrize("kind", CLASSES)
def test_logits_are_those_of_timm(kind, size, window, randomise, tmp_path):
    theirs = getattr(import_timm().models, CLASSES[kind])(img_size=size, window_size=window, **SHAPE).eval()
    randomise(theirs, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = build_model(config(kind, list(size), window))
    load_float(ours, tmp_path / "timm.pth")
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected, logits = theirs(images), ours(images)
    assert (expected[0] - expected[1]).std() > 0.02
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def windows_of_microsoft(tokens, window, block):
    """The window's sides and their shifts on a map in the repository microsoft/Swin-Transformer, in closed form.

    One number holds for both sides: the window, or the map's smaller side where that is no larger, and then nothing is
    shifted. None: the code fails, because it pads nothing.
    """
    side = min(window, *tokens)
    shift = window // 2 if block % 2 and min(tokens) > window else 0
    return None if any(along % side for along in tokens) else ((side, side), (shift, shift))


@given(
    height=st.integers(1, 40), width=st.integers(1, 40), window=st.integers(2, 12), stages=st.integers(1, 4)
)  # fmt: skip
@example(height=16, width=24, window=4, stages=2)
@example(height=16, width=8, window=4, stages=2)
def test_windows_are_microsofts_where_a_map_holds_squares_along_both_sides(height, width, window, stages):
    """For maps of height * 2^(stages - 1), and so on: elsewhere that code has other windows or shifts, or fails."""
    size = [4 * side << stages - 1 for side in (height, width)]
    base = read_geometry(config("swin", [96, 64], 4))
    ours = replace(base, image_size=size[0], image_width=size[1], window=window, depths=(2,) * stages)
    same = [
        (ours.windows(stage), ours.shifts(stage, block)) == windows_of_microsoft(ours.tokens(stage), window, block)
        for stage in range(stages)
        for block in range(2)
    ]
    maps = [compute_map_size(size, 4, stage) for stage in range(stages)]
    holds_squares = all(side > window and side % window == 0 for both in maps for side in both)
    is_square = height == width and all(side % min(window, side) == 0 for side, _ in maps)
    assert all(same) == (holds_squares or is_square)


@pytest.mark.parametrize(
    ("kind", "size", "more", "says"),
    [
        ("swin", [190, 224], {}, "DATA.IMG_SIZE .190, 224. is not a multiple of MODEL.SWIN.PATCH_SIZE 4"),
        ("swin", [96, 72], {}, "patches of an odd resolution cannot be merged: stage 1, 12 x 9 "),
        ("swin", [96, 64], {"APE": True}, "absolute positions .APE. are those of square pictures"),
        ("swinv2", [16, 64], {}, "a window of 1 has no relative coordinates: stage 2, 1 x 4 "),
        ("swin", [96, 64, 3], {}, "DATA.IMG_SIZE is .96, 64, 3., but must be a side, or height and width"),
        ("swin", [96, 0], {}, r"DATA.IMG_SIZE\[1\] is 0, but must be at least 1"),
        ("swin", "96x64", {}, "DATA.IMG_SIZE must be a whole number, not '96x64'"),
    ],
)
def test_sizes_that_no_model_has(kind, size, more, says):
    with pytest.raises(UsageError, match=says):
        config(kind, size, 4, **more)


@pytest.mark.parametrize("backend", ["cuda", "fastertransformer"])
def test_targets_with_kernels_of_squares_say_so(backend, tmp_path):
    cfg = config("swin", [96, 64], 4, EMBED_DIM=32)
    torch.save(build_model(cfg).state_dict(), tmp_path / "x.pth")
    model = sq.load(tmp_path / "x.pth", cfg)
    with pytest.raises(UsageError, match="pictures of 96 x 64 are not square, and this target"):
        sq.export(model, backend, tmp_path, precision="float")
    assert not list(tmp_path.glob("*.safetensors"))
