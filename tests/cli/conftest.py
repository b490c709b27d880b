"""The command line run in this process, and what its commands are given."""

import json
import shutil
from pathlib import Path

import pytest

from swin_quant.cli import main


@pytest.fixture(autouse=True)
def every_process_left_alone(process_left_alone):
    """Whatever a test of the commands calls."""


@pytest.fixture
def own_pictures(pictures, tmp_path) -> Path:
    """A copy of `pictures` that a test may damage."""
    return Path(shutil.copytree(pictures, tmp_path / "own"))


@pytest.fixture(scope="session")
def float_flags(micro, pictures):
    """The options that every calibration needs: V1, its weights, the pictures, 2 batches of 4."""
    return [
        *("--cfg", micro / "swin.yaml", "--checkpoint", micro / "swin.pth", "--data-path", pictures),
        *("--pictures", 8, "--batch", 4, "--device", "cpu", "--half", "none"),
    ]


@pytest.fixture(scope="session")
def ft_flags(micro, pictures):
    """The same in the words of main.py."""
    return [
        *("--cfg", micro / "swin.yaml", "--resume", micro / "swin.pth", "--data-path", pictures),
        *("--num-calib-batch", 2, "--calib-batchsz", 4, "--device", "cpu", "--half", "none"),
    ]


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory, float_flags) -> Path:
    """swin_micro_calib.pth and its card, with results under ft-mode1. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("calibrated")
    words = [str(word) for word in (*float_flags, "--policy", "ft-mode1", "--output", folder, "--quiet")]
    assert main(["calibrate", *words]) == 0
    return folder / "swin_micro_calib.pth"


@pytest.fixture(scope="session")
def scoring_flags(micro, pictures):
    """The options of an evaluation besides its checkpoint: the float32 baseline, and no more than a test asks for."""
    return ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--half", "none"]


@pytest.fixture(scope="session")
def card_of():
    """card_of(checkpoint) -> the content of its run card."""
    return lambda checkpoint: json.loads(Path(checkpoint).with_suffix(".json").read_text())
