"""Class folders as torchvision reads them, and stray things in folders; tables of pictures: common column names, and
every bad line by its number."""

import os
from pathlib import Path

import pytest
from PIL import Image

from swin_quant.base.compat import import_torchvision
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.folder import FolderPictures, NamedPictures
from swin_quant.data.pictures import MAX_BYTES, UnreadablePicture
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused


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


def test_an_empty_class_keeps_its_label(tmp_path):
    (tmp_path / "a").mkdir()
    put(tmp_path / "b/1.png")
    assert FolderPictures(tmp_path).labels == [1] and FolderPictures(tmp_path).class_names == ["a", "b"]


@pytest.fixture
def linked(tmp_path):
    """`link` leads to the data folder `data`, whose split `val` has links of every kind."""
    put(tmp_path / "elsewhere/1.png", 5)
    val = tmp_path / "data/val"
    for name in ("val/a/1.png", "val/b/1.png", "pool/1.png"):
        put(tmp_path / "data" / name, 7)
    out = ("a/file.png", "a/folder", "a/gone.png", "class")
    for link, target in {
        **dict.fromkeys(out, tmp_path / "elsewhere"),
        "a/file.png": tmp_path / "elsewhere/1.png",
        "a/gone.png": tmp_path / "nowhere.png",
        "a/loop": val / "a",
        "a/up": val,
        "b/top": Path("/"),
        "b/inside": val / "a",
        "b/lost.png": val / "b/nowhere.png",
        "b/pooled.png": tmp_path / "data/pool/1.png",
    }.items():
        (val / link).symlink_to(target)
    (tmp_path / "link").symlink_to(tmp_path / "data", target_is_directory=True)
    return tmp_path / "link"


def test_links_that_lead_out_or_above_are_not_followed_and_named(linked, caplog):
    pictures = open_pictures(str(linked), "val", num_classes=2)
    assert pictures.names == ["a/1.png", "b/1.png", "b/lost.png", "b/pooled.png", "b/inside/1.png"]
    assert pictures.class_names == ["a", "b"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert "7 links" in line and "a/file.png, a/folder, a/gone.png and 4 more" in line and "cp -rL" in line
    refused(lambda: pictures.read(2), "b/lost.png: no such picture", kind=UnreadablePicture)
    assert pictures.read(3).getpixel((0, 0)) == (7, 7, 7)


def test_a_folder_of_links_alone_says_why_it_has_no_pictures(tmp_path, caplog):
    put(tmp_path / "full/a/1.png")
    (tmp_path / "some").mkdir()
    (tmp_path / "some/a").symlink_to(tmp_path / "full/a")
    (tmp_path / "some/1.heic").write_bytes(b"")
    for labelled in (True, False):
        with pytest.raises(SwinQuantError, match=r"/some: found no pictures.*\.jpeg.* 1 \.heic.*; 1 links"):
            FolderPictures(tmp_path / "some", labelled)
    with pytest.raises(UsageError, match=r"no picture there.* 1 \.heic; 1 links lead out of it"):
        NamedPictures([tmp_path / "some"])
    assert not caplog.records


@pytest.mark.parametrize("labelled", [True, False])
def test_what_is_not_taken_is_counted_by_extension_and_empty_classes_are_named(tmp_path, caplog, labelled):
    for name in "a/1.png a/2.heic a/deep/3.HEIC a/4.svg a/README b/5.heic 5.png 6.heic .hidden/6.heic".split():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"")
    assert FolderPictures(tmp_path, labelled).names == ["a/1.png"]
    left, empty = (record.getMessage() for record in caplog.records)
    assert "1 of 2 classes have no picture: b" in empty
    kinds = "3 .heic, 1 .svg, 1 without an extension, 1 .png beside the folders of classes, "
    kinds += "1 .heic beside the folders of classes"
    assert left.endswith(f"7 files are not taken for pictures: {kinds}")


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


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_silently_short(tmp_path, monkeypatch):
    put(tmp_path / "a/1.png")
    put(tmp_path / "a/locked/2.png")
    real = os.scandir

    def refusing(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)  # permissions do not bind root, who may run tests
    refused(lambda: FolderPictures(tmp_path), "locked: cannot be listed: Permission denied")


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
    refused(lambda: open_pictures(f"wnids:{part}", "val", num_classes=7), "no ImageNet of 7 classes")
    with pytest.raises(SwinQuantError, match="split train: found no folders named by wnid"):
        open_pictures(f"wnids:{part}", "train", num_classes=1000)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "a.png", "deep/c.PNG", ".hidden/x.png", ".dot.png", "odd[1].png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), len(name)).save(path, format="png")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_is_its_pictures_in_all_levels_without_hidden_ones(folder):
    found = [os.path.relpath(name, folder) for name in NamedPictures([folder]).names]
    assert found == ["a.png", "b.png", "deep/c.PNG", "odd[1].png"]


def test_a_named_file_is_read_whatever_its_extension_and_a_missing_one_is_unreadable(folder):
    (folder / "picture.data").write_bytes((folder / "a.png").read_bytes())
    pictures = NamedPictures([folder / "picture.data", folder / "notes.txt", folder / "gone.png"])
    assert pictures.read(0).size == (4, 4) and list(pictures.labels) == [-1, -1, -1]
    for index, message in ((1, "not a picture"), (2, "gone.png: no such picture")):
        with pytest.raises(UnreadablePicture, match=message):
            pictures.read(index)


def test_nothing_to_read(folder):
    (folder / "empty").mkdir()
    for place in ("empty", "*.gif"):
        with pytest.raises(UsageError, match="no picture there"):
            NamedPictures([folder / place])
    refused(lambda: NamedPictures([]), "name files, folders or patterns", kind=UsageError)
