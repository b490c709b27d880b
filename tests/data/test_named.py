"""Files, folders and patterns become pictures in the given order."""

import os

import pytest
from PIL import Image

from swin_quant.base.errors import UsageError
from swin_quant.data.named import NamedPictures
from swin_quant.data.pictures import UnreadablePicture


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "a.png", "deep/c.PNG", ".hidden/x.png", ".dot.png", "odd[1].png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), len(name)).save(path, format="png")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def names(folder, *places):
    return [os.path.relpath(name, folder) for name in NamedPictures([folder / place for place in places]).names]


def test_a_folder_is_its_pictures_in_all_levels_without_hidden_ones(folder):
    assert names(folder, "") == ["a.png", "b.png", "deep/c.PNG", "odd[1].png"]


def test_a_named_file_is_read_whatever_its_extension_and_a_missing_one_is_unreadable(folder):
    (folder / "picture.data").write_bytes((folder / "a.png").read_bytes())
    pictures = NamedPictures([folder / "picture.data", folder / "notes.txt", folder / "gone.png"])
    assert pictures.read(0).size == (4, 4) and list(pictures.labels) == [-1, -1, -1]
    for index, message in ((1, "not a picture"), (2, "gone.png: No such file")):
        with pytest.raises(UnreadablePicture, match=message):
            pictures.read(index)


def test_nothing_to_read(folder):
    (folder / "empty").mkdir()
    for place in ("empty", "*.gif"):
        with pytest.raises(UsageError, match="no picture there"):
            NamedPictures([folder / place])
    with pytest.raises(UsageError, match="name files, folders or patterns"):
        NamedPictures([])
