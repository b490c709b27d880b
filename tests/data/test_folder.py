"""Class folders as torchvision reads them, and the odd things that lie about in folders."""

import os
from pathlib import Path

import pytest
from PIL import Image

from swin_quant.base.compat import import_torchvision
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import MAX_BYTES, UnreadablePicture


def put(path: Path, grey: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), grey).save(path)
    return path


def test_order_and_labels_are_those_of_torchvision(tmp_path):
    names = ["dog/2.png", "dog/10.png", "cat/b/1.PNG", "cat/b-c/0.jpg", "cat/z.JPEG", "Ant/x.bmp", "cat/b/a/3.tif"]
    for name in names:
        put(tmp_path / name)
    (tmp_path / "cat/notes.txt").write_text("no picture")
    put(tmp_path / "stray.png")
    import_torchvision()
    from torchvision.datasets import ImageFolder

    expected = ImageFolder(str(tmp_path)).samples
    pictures = FolderPictures(tmp_path)
    assert [(str(tmp_path / n), label) for n, label in zip(pictures.names, pictures.labels, strict=True)] == expected
    assert pictures.class_names == ["Ant", "cat", "dog"] and len(pictures) == len(names)


def test_a_picture_is_read(tmp_path):
    put(tmp_path / "a/1.png", 77)
    assert FolderPictures(tmp_path).read(0).getpixel((3, 3)) == (77, 77, 77)


def test_an_empty_class_keeps_its_label(tmp_path):
    (tmp_path / "a").mkdir()
    put(tmp_path / "b/1.png")
    assert FolderPictures(tmp_path).labels == [1] and FolderPictures(tmp_path).class_names == ["a", "b"]


def test_dot_files_and_folders_are_skipped(tmp_path):
    for name in [".cache/1.png", "a/._1.png", "a/.thumbs/1.png", "a/1.png"]:
        put(tmp_path / name)
    pictures = FolderPictures(tmp_path)
    assert pictures.names == ["a/1.png"] and pictures.class_names == ["a"]


def test_links_are_followed_and_loops_end(tmp_path):
    put(tmp_path / "elsewhere/1.png", 5)
    split = tmp_path / "val"
    (split / "a").mkdir(parents=True)
    (split / "a/linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (split / "a/loop").symlink_to(split / "a", target_is_directory=True)
    (split / "a/gone.png").symlink_to(tmp_path / "nowhere.png")
    pictures = FolderPictures(split)
    assert pictures.names == ["a/gone.png", "a/linked/1.png"]
    assert pictures.read(1).getpixel((0, 0)) == (5, 5, 5)
    with pytest.raises(UnreadablePicture, match="a/gone.png: No such file"):
        pictures.read(0)


def test_pipes_and_giants_are_unreadable(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a/1.png")
    with open(tmp_path / "a/2.png", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    pictures = FolderPictures(tmp_path)
    for index, reason in enumerate(["not a regular file", "larger than 64 MiB"]):
        with pytest.raises(UnreadablePicture, match=reason):
            pictures.read(index)


def test_names_that_are_not_utf8_are_read_and_printable(tmp_path):
    path = os.fsencode(tmp_path / "a") + b"/\xff\n.png"
    put(tmp_path / "a/plain.png", 9)
    try:
        os.rename(tmp_path / "a/plain.png", path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    pictures = FolderPictures(tmp_path)
    assert pictures.names[0].isprintable()
    assert pictures.read(0).getpixel((0, 0)) == (9, 9, 9)


def test_a_flat_folder_serves_where_labels_do_not_matter(tmp_path):
    put(tmp_path / "2.png")
    put(tmp_path / "1.png")
    pictures = FolderPictures(tmp_path, labelled=False)
    assert pictures.names == ["1.png", "2.png"] and pictures.labels == [-1, -1]
    with pytest.raises(SwinQuantError, match="<class>/<picture>"):
        FolderPictures(tmp_path)


def test_class_folders_are_preferred_to_stray_files(tmp_path):
    put(tmp_path / "stray.png")
    put(tmp_path / "a/1.png")
    assert FolderPictures(tmp_path, labelled=False).names == ["a/1.png"]


def test_a_folder_without_pictures_says_what_it_looks_for(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/readme.md").write_text("")
    with pytest.raises(SwinQuantError, match=r"found no pictures.*\.jpeg") as caught:
        FolderPictures(tmp_path, labelled=False)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_silently_short(tmp_path, monkeypatch):
    put(tmp_path / "a/1.png")
    put(tmp_path / "a/locked/2.png")
    real = os.scandir

    def refusing(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)  # permissions do not bind root, who often runs tests
    with pytest.raises(SwinQuantError, match="locked: cannot be listed: Permission denied"):
        FolderPictures(tmp_path)
