"""Input for verbs: a micro model in memory, its pictures as data sets and as tensors, a checkpoint of digits."""

import pytest
from torch.utils.data import DataLoader, TensorDataset

import swin_quant as sq
from swin_quant.checkpoint import save_float
from swin_quant.config import find_config, load_config
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.models import build_model
from tests.helpers.known_times import with_known_times


@pytest.fixture(autouse=True)
def every_process_left_alone(process_left_alone):
    """Restores the process after every test of the commands, whatever they call."""


@pytest.fixture
def model(micro):
    return sq.load(micro / "swin.pth", config=micro / "swin.yaml")


@pytest.fixture
def clock(monkeypatch):
    with_known_times(monkeypatch)


@pytest.fixture
def train(pictures):
    return sq.pictures(pictures, "train", 8)


@pytest.fixture
def val(pictures):
    return sq.pictures(pictures, "val")


@pytest.fixture(scope="session")
def tensors(pictures):
    """tensors("train" | "val", size) -> a DataLoader of the prepared pictures."""

    def load(split, size=3):
        opened = sq.pictures(pictures, split).open()
        preprocess = Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
        batch = next(load_batches(opened, preprocess, [range(len(opened))]))
        return DataLoader(TensorDataset(batch.images, batch.labels), batch_size=size)

    return load


@pytest.fixture(scope="session")
def cfg():
    """The demo's Swin of digits, with one block a stage and 8 channels."""
    keys = {"EMBED_DIM": 8, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
    overrides = {"DATA.DATA_PATH": "digits"} | {f"MODEL.SWIN.{key}": value for key, value in keys.items()}
    return load_config(find_config("swin_digits"), overrides=overrides)


@pytest.fixture(scope="session")
def weights(cfg, randomise, tmp_path_factory):
    """The name of its float checkpoint."""
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    save_float(randomise(build_model(cfg)), path)
    return str(path)
