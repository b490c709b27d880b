"""Tar shards: members are found by their headers and read from their offsets; a broken shard is named."""

import io
import pickle
import tarfile

import pytest

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.pictures import UnreadablePicture
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused


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
