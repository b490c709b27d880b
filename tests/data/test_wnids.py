"""A part of ImageNet: few folders, with the labels of the whole."""

import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.sources import open_pictures


@pytest.fixture
def part(tmp_path, files, imagenet):
    """Folders of classes 2, 500 and 999."""
    for (name, data), number in zip(files.items(), (2, 2, 500, 500, 999, 999), strict=True):
        folder = tmp_path / "part" / "val" / imagenet[number]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.split("/")[1]).write_bytes(data)
    return tmp_path / "part"


def test_labels_are_those_of_the_whole(part, alike, imagenet):
    pictures = open_pictures(str(part), "val", num_classes=1000)
    alike(pictures, labels=False)
    assert pictures.labels == [2, 2, 500, 500, 999, 999] and pictures.class_names == imagenet
    assert open_pictures(f"wnids:{part}", "val").labels == pictures.labels
    # A model with just these classes
    assert open_pictures(str(part), "val", num_classes=3).labels == [0, 0, 1, 1, 2, 2]


def test_a_folder_that_is_no_class_is_named(part):
    (part / "val" / "n99999999").mkdir()
    with pytest.raises(SwinQuantError, match="other classes than the model: n99999999 there alone"):
        open_pictures(str(part), "val", num_classes=1000)
    with pytest.raises(SwinQuantError, match="no ImageNet of 7 classes"):
        open_pictures(f"wnids:{part}", "val", num_classes=7)
    with pytest.raises(SwinQuantError, match="split train: found no folders named by wnid"):
        open_pictures(f"wnids:{part}", "train", num_classes=1000)
