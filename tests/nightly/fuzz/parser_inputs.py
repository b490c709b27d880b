"""What the attacked parsers are given: a micro model, its card, and files as bytes."""

import functools
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from swin_quant.base.files import configs_dir
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config, to_dict
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy

Files = dict[str, bytes]
TESTS = Path(__file__).parents[2]
MICRO = {"EMBED_DIM": 32, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2}


@dataclass(frozen=True)
class Parser:
    """`valid()`: folders that the parser accepts, as {name: bytes}; `parse(folder)`: reads a folder as the tool does.

    `refuses`: False if damage is only warned of.
    """

    name: str
    valid: Callable[[], list[Files]]
    parse: Callable[[Path], object]
    refuses: bool = True


@functools.cache
def config():
    keys = {f"MODEL.SWIN.{key}": value for key, value in MICRO.items()}
    return load_config(
        configs_dir() / "demo" / "swin_digits.yaml",
        overrides={"DATA.IMG_SIZE": 8, "MODEL.NUM_CLASSES": 3, "MODEL.NAME": "micro", **keys},
    )


@functools.cache
def model() -> nn.Module:
    """A calibrated micro model."""
    torch.manual_seed(0)
    made = build_model(config()).eval()
    apply_policy(made, load_policy("ft-mode1"))
    calibrate(made, [torch.randn(4, 3, 8, 8)])
    return made


@functools.cache
def plain_model() -> nn.Module:
    return build_model(config())


def encoded(content: object, save: Callable = torch.save, **options) -> bytes:
    buffer = io.BytesIO()
    save(content, buffer, **options)
    return buffer.getvalue()


def card(**more) -> RunCard:
    return RunCard(
        "micro",
        to_dict(config()),
        Preprocess.from_config(config()).to_dict(),
        source={"file": "x.pth", "sha256": "1" * 64, "format": "pth", "path": "../x.pth"},
        policy=load_policy("ft-mode1").to_dict(),
        **more,
    )


def written(name: str, write: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, name))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
