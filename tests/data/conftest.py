"""The same few pictures in folders, with which every other kind of data set is compared."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from swin_quant.base.compat import import_timm
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import Pictures

CLASSES = ("cat", "dog", "fox")


@pytest.fixture
def folders(tmp_path) -> FolderPictures:
    """`<tmp_path>/folders/<class>/<number>.png`: two pictures for each of three classes, 32 x 32 noise."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (tmp_path / "folders" / name).mkdir(parents=True)
        for number in range(2):
            noise = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "folders" / name / f"{number}.png")
    return FolderPictures(tmp_path / "folders")


@pytest.fixture
def files(folders) -> dict[str, bytes]:
    """The files of the folders by name."""
    return {name: folders.open(index) for index, name in enumerate(folders.names)}


@pytest.fixture
def alike(folders):
    """Compares pictures with those in the folders: number, labels, and every pixel."""

    def check(pictures: Pictures, order: list[int] | None = None, labels: bool = True) -> None:
        order = list(range(len(folders))) if order is None else order
        assert len(pictures) == len(order)
        for index, other in enumerate(order):
            assert np.array_equal(np.asarray(pictures.read(index)), np.asarray(folders.read(other)))
            assert not labels or pictures.labels[index] == folders.labels[other]

    return check


@pytest.fixture
def imagenet() -> list[str]:
    """The 1000 wnids in the order of published heads, as in timm's file."""
    listing = Path(str(import_timm().__file__)).parent / "data" / "_info" / "imagenet_synsets.txt"
    return listing.read_text().split()
