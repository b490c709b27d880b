"""Zip and map: every defect has a line number or costs one picture. Tar shards: members are found by their headers and
read from their offsets; a broken shard is named. Nothing is ever extracted."""

import io
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from encoded import encoded, zipped
from PIL import Image

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data import picture_set
from swin_quant.data.archives import ZipPictures
from swin_quant.data.pictures import UnreadablePicture
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused


def png(grey: int) -> bytes:
    return encoded(Image.new("L", (8, 8), grey))


@pytest.mark.parametrize("held", [[], [1], [0, 1, 2]])
def test_members_are_read_in_the_order_of_the_map_and_nothing_is_extracted(tmp_path, held):
    members = {"a/1.png": png(10), "b/猫.PNG": png(20), "unlisted.png": png(30), "c.png": png(40)}
    zipped(tmp_path, members, "c.png\t7\nb/猫.PNG\t0\na/1.png\t7\n")
    pictures = ZipPictures(tmp_path, "val")
    pictures.hold(held)
    assert pictures.names == ["c.png", "b/猫.PNG", "a/1.png"]
    assert pictures.labels == [7, 0, 7]
    assert [pictures.open(index) for index in range(3)] == [png(40), png(20), png(10)]
    assert pictures.read(1).getpixel((0, 0)) == (20, 20, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["val.zip", "val_map.txt"]


BAD_LINES = {
    "no label behind it": ("a.png", "found 0 tabs"),
    "three fields": ("a.png\t0\t1", "found 2 tabs"),
    "word for a label": ("a.png\tcat", "'cat' is not an integer"),
    "float label": ("a.png\t1.0", "not an integer"),
    "python-only integer": ("a.png\t1_0", "not an integer"),
    "no label": ("a.png\t", "not an integer"),
    "endless label": ("a.png\t" + "9" * 5000, "not an integer"),
    "negative label": ("a.png\t-1", "-1 is outside 0 to 9"),
    "label out of range": ("a.png\t10", r"10 is outside 0 to 9 \(MODEL.NUM_CLASSES is 10\)"),
    "member missing": ("b.png\t0", r"b.png is missing from .*val\.zip"),
    "member listed twice": ("first.png\t1", "listed a second time"),
    "absolute path": ("/etc/a.png\t0", "relative path"),
    "parent folder": ("../a.png\t0", "relative path"),
    "parent folder inside": ("x/../../a.png\t0", "relative path"),
    "backslash": ("x\\a.png\t0", "relative path"),
    "drive letter": ("C:/a.png\t0", "relative path"),
    "control character": ("a\x1b.png\t0", "relative path"),
    "no picture": ("a.exe\t0", "does not end in .jpg"),
    "not UTF-8": (b"\xff\xfe.png\t0", "UTF-8"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, case):
    line, reason = BAD_LINES[case]
    line = line if isinstance(line, bytes) else line.encode()
    names = ["first.png", "a.png", "/etc/a.png", "../a.png", "x/../../a.png", "x\\a.png", "C:/a.png", "a.exe"]
    zipped(tmp_path, {name: png(0) for name in names}, b"first.png\t0\n\n" + line + b"\n")
    with pytest.raises(SwinQuantError, match=rf"val_map\.txt, line 3: .*{reason}"):
        ZipPictures(tmp_path, "val", num_classes=10)


@pytest.mark.parametrize("name", ["val.zip", "val_map.txt", "classes.txt"])
def test_devices_and_pipes_are_refused_unread(tmp_path, name):
    zipped(tmp_path, {"a.png": png(0)})
    for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        with pytest.raises(SwinQuantError, match=rf"{name}: .*(not a regular|no such) file"):
            ZipPictures(tmp_path, "val")


@pytest.mark.parametrize("lost", ["val.zip", "val_map.txt"])
def test_a_missing_half_is_named(tmp_path, lost):
    zipped(tmp_path, {"a.png": png(0)})
    (tmp_path / lost).unlink()
    with pytest.raises(SwinQuantError, match=rf"{lost}: .*(zip reads|needs this file)"):
        ZipPictures(tmp_path, "val")


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"<html>404</html>", lambda data: data[:-10]])
def test_a_damaged_archive_is_an_error(tmp_path, damage):
    zipped(tmp_path, {"a.png": png(0)})
    path = tmp_path / "val.zip"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: ZipPictures(tmp_path, "val"), "val.zip: not a readable zip archive")


def patch_headers(path: Path, local: int, central: int, value: bytes) -> None:
    """Overwrite one field of the only member in its local header and in the central directory."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        start = data.index(signature) + offset
        data[start : start + len(value)] = value
    path.write_bytes(data)


def unreadable(root: Path, reason: str) -> None:
    pictures = ZipPictures(root, "val")
    pictures.hold([0])  # this must not end the run either
    refused(lambda: pictures.read(0), f"a.png: {reason}", kind=UnreadablePicture)


def test_members_that_are_encrypted_or_declare_too_much_are_unreadable(tmp_path):
    for field, reason in (((6, 8, b"\x01"), "encrypted"), ((22, 24, b"\0\0\x10\x04"), "larger than 64 MiB")):
        zipped(tmp_path, {"a.png": png(0)})
        patch_headers(tmp_path / "val.zip", *field)
        unreadable(tmp_path, reason)


def test_a_member_that_unpacks_to_more_than_it_declares_costs_no_memory(tmp_path):
    zipped(tmp_path, {"a.png": bytes(100 << 20)})
    patch_headers(tmp_path / "val.zip", 22, 24, (10).to_bytes(4, "little"))
    pictures = ZipPictures(tmp_path, "val")
    tracemalloc.start()
    try:
        refused(lambda: pictures.read(0), "a.png: ", kind=UnreadablePicture)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize(
    ("cache_mode", "held"), [("no", lambda i: False), ("part", lambda i: i % 2 == 1), ("full", lambda i: True)]
)
def test_the_cache_holds_this_ranks_share_with_any_number_of_pictures(tmp_path, count, cache_mode, held, monkeypatch):
    zipped(tmp_path, {f"{i}.png": png(i) for i in range(count)})
    tracked = []
    monkeypatch.setattr(picture_set, "track", lambda share, *how: tracked.append(list(share)) or share)
    opened = picture_set.PictureSet(str(tmp_path), "val", cache_mode=cache_mode).open(world=World(1, 2))
    pictures = pickle.loads(pickle.dumps(opened))  # the copy has no open file, only its cache
    (tmp_path / "val.zip").unlink()
    for index in range(count):
        if held(index):
            assert pictures.read(index).getpixel((0, 0))[0] == index
        else:
            with pytest.raises(SwinQuantError, match=r"val\.zip: no such file"):
                pictures.read(index)
    assert tracked == [[index for index in range(count) if held(index)]]


def test_class_names_come_from_classes_txt_if_there_is_one(tmp_path):
    zipped(tmp_path, {"a.png": png(0), "b.png": png(0)})
    assert ZipPictures(tmp_path, "val").class_names == ["0", "1"]
    assert ZipPictures(tmp_path, "val", num_classes=3).class_names == ["0", "1", "2"]
    (tmp_path / "classes.txt").write_text("cat\r\ndog\r\n")
    assert ZipPictures(tmp_path, "val").class_names == ["cat", "dog"]
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe")
    refused(lambda: ZipPictures(tmp_path, "val"), "classes.txt: is no list of class names: it is not UTF-8")


def shard(path, members: dict[str, bytes], form=tarfile.USTAR_FORMAT):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def members(files, folders) -> list[tuple[str, bytes]]:
    """key.png and key.cls of each picture, as webdataset writes them."""
    pairs = []
    for number, (name, data) in enumerate(files.items()):
        key = f"./{number:06d}"
        pairs += [(f"{key}.cls", str(folders.labels[number]).encode()), (f"{key}.png", data), (f"{key}.json", b"{}")]
        assert name == folders.names[number]
    return pairs


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_give_the_pictures_and_labels_of_the_folders(tmp_path, members, alike, form):
    long = ("x" * 150 + "/") if form != tarfile.USTAR_FORMAT else ""
    for number in range(2):
        part = members[9 * number : 9 * number + 9]
        shard(tmp_path / f"val-{number:04d}.tar", {long + name: data for name, data in part}, form)
    places = (str(tmp_path), f"wds:{tmp_path}/val-{{0000..0001}}.tar", f"{tmp_path}/{{split}}-*.tar")
    for place in places:
        pictures = open_pictures(place, "val", num_classes=3)
        alike(pictures)
        alike(pickle.loads(pickle.dumps(pictures)))
    assert pictures.names[5].startswith("val-0001.tar/") and pictures.names[5].endswith("000005.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\nfox\n")
    assert open_pictures(str(tmp_path), "val", num_classes=3).class_names == ["cat", "dog", "fox"]


def test_pictures_without_labels_serve_where_none_are_needed(tmp_path, files):
    shard(tmp_path / "a.tar", {"1.png": files["cat/0.png"], "2.png": files["dog/0.png"], "2.cls": b"1"})
    assert open_pictures(f"{tmp_path}/a.tar", "val").labels == [-1, 1]
    refused(lambda: open_pictures(f"{tmp_path}/a.tar", "val", num_classes=2), "a.tar/1.png: has no label")


@pytest.mark.parametrize("where", ["header", "data", "end"])
def test_a_shard_that_is_cut_off_or_damaged_is_named(tmp_path, members, where):
    path = shard(tmp_path / "val.tar", dict(members))
    whole = path.read_bytes()
    second = whole.index(b"./000001.cls")
    path.write_bytes({"header": whole[: second + 100], "data": whole[: second - 200], "end": whole[:second]}[where])
    with pytest.raises(
        SwinQuantError, match=r"val\.tar: not a readable tar archive: .*(cut off|unexpected end|damaged)"
    ):
        open_pictures(str(tmp_path), "val")
    path.write_bytes(whole[:second] + b"\xff" * 512 + whole[second + 512 :])
    with pytest.raises(SwinQuantError, match=rf"val\.tar: .*damaged at byte {second}"):
        open_pictures(str(tmp_path), "val")


BAD = {
    "label is a word": ({"a.png": b"x", "a.cls": b"cat"}, "a.cls: label 'cat' is not a whole number"),
    "label is long": ({"a.png": b"x", "a.cls": b"1" * 1000}, "a.cls: a label of 1000 bytes"),
    "two of a key": ({"a.png": b"x", "a.jpg": b"x"}, "a.jpg: a second picture of its key"),
    "parent folder": ({"../a.png": b"x"}, "'../a.png' is not a plain relative path"),
    "label too large": ({"a.png": b"x", "a.cls": b"3"}, "a.png: label 3 is outside 0 to 2"),
    "no pictures": ({"a.txt": b"x"}, "no pictures in it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_member_is_named(tmp_path, case):
    members, reason = BAD[case]
    shard(tmp_path / "val.tar", members)
    with pytest.raises(SwinQuantError, match=rf"val\.tar.*{reason}"):
        open_pictures(str(tmp_path), "val", num_classes=3)


def test_compressed_missing_and_endless_shards_are_refused(tmp_path):
    with tarfile.open(tmp_path / "val.tar", "w:gz"):
        pass
    refused(lambda: open_pictures(str(tmp_path), "val"), "is compressed: unpack it")
    refused(
        lambda: open_pictures(f"wds:{tmp_path}/val-{{0003..0004}}.tar", "val"), "val-0003.tar: the tar archive cannot"
    )
    with pytest.raises(UsageError, match="1,000,000,000 files: at most 100,000"):
        open_pictures(f"wds:{tmp_path}/{{0..999999999}}.tar", "val")


def test_a_header_cannot_ask_for_more_memory_than_headers_need(tmp_path):
    info = tarfile.TarInfo("a.png")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    (tmp_path / "val.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    refused(
        lambda: open_pictures(str(tmp_path), "val"), "not a readable tar archive: it is damaged (ReadError: a header"
    )


def test_a_shard_that_shrinks_costs_its_pictures_only(tmp_path, members):
    path = shard(tmp_path / "val.tar", dict(members))
    pictures = open_pictures(str(tmp_path), "val", num_classes=3)
    path.write_bytes(path.read_bytes()[:3000])
    assert pictures.labels == [0, 0, 1, 1, 2, 2]
    refused(lambda: pictures.read(5), "shorter than it was", kind=UnreadablePicture)
