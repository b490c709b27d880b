"""Parquet as Hugging Face's `datasets` writes it."""

import json
import pickle

import pytest

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.pictures import UnreadablePicture
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused

FEATURES = {"info": {"features": {"label": {"names": ["cat", "dog", "fox"], "_type": "ClassLabel"}}}}


@pytest.fixture
def pyarrow():
    pytest.importorskip("pyarrow.parquet")
    import pyarrow

    return pyarrow


def write(pyarrow, path, data, labels, features=None, group=2):
    images = [{"bytes": each, "path": None} for each in data]
    table = pyarrow.table({"image": images, "label": labels})
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def test_rows_are_the_pictures_of_the_folders(tmp_path, pyarrow, files, folders, alike):
    data = list(files.values())
    for part in range(2):
        name = f"val-{part:05d}-of-00002.parquet"
        write(pyarrow, tmp_path / "data" / name, data[3 * part :][:3], folders.labels[3 * part :][:3], FEATURES)
    places = (str(tmp_path), f"parquet:{tmp_path}/data/{{split}}-*.parquet")
    for place in places:
        pictures = open_pictures(place, "val", num_classes=3)
        alike(pictures)
        alike(pickle.loads(pickle.dumps(pictures)))
    assert pictures.class_names == ["cat", "dog", "fox"]
    assert pictures.names[4] == "val-00001-of-00002.parquet/000001"


def test_plain_bytes_and_names_of_classes_serve_as_well(tmp_path, pyarrow, files, folders, alike):
    names = [name.split("/")[0] for name in files]
    table = pyarrow.table({"img": list(files.values()), "class": names})
    pyarrow.parquet.write_table(table, tmp_path / "val.parquet")
    pictures = open_pictures(str(tmp_path), "val", num_classes=3)
    alike(pictures)
    assert pictures.class_names == ["cat", "dog", "fox"]


def test_what_is_wrong_is_named(tmp_path, pyarrow, files, folders):
    path, data = tmp_path / "val.parquet", list(files.values())
    write(pyarrow, path, [data[0], None, data[2]], [0, 0, 1])
    pictures = open_pictures(str(tmp_path), "val", num_classes=3)
    refused(lambda: pictures.read(1), "val.parquet/000001: no bytes of it", kind=UnreadablePicture)
    refused(lambda: open_pictures(str(tmp_path), "val", num_classes=1), "000002: label 1 is outside 0 to 0")
    path.write_bytes(path.read_bytes()[:-9])
    refused(lambda: open_pictures(str(tmp_path), "val", num_classes=3), "val.parquet: not a readable Parquet file")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    refused(lambda: open_pictures(str(tmp_path), "val", num_classes=3), "no column of pictures among text")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "val.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"pyarrow.parquet cannot be imported .*\[data\]"):
        open_pictures(str(tmp_path), "val", num_classes=3)


def dictionary(pyarrow, value, rows):
    """A column with one value, however many rows it has."""
    return pyarrow.DictionaryArray.from_arrays([0] * rows, pyarrow.array([value]))


NONE = 2**20 + 10**5
LONG = "x" * 10**6
# A few kB each: columns, made of pyarrow and a picture; how they are written; the message.
BOMBS = {
    "labels by dictionary": (
        lambda pa, picture: {"image": [picture] * 1000, "label": dictionary(pa, LONG, 1000)},
        {},
        "more text",
    ),
    "labels by prefix": (
        lambda pa, picture: {"image": [picture] * 400, "label": [f"{LONG}{number}" for number in range(400)]},
        {"use_dictionary": False, "column_encoding": {"label": "DELTA_BYTE_ARRAY"}},
        "more text",
    ),
    "pictures by dictionary": (lambda pa, _: {"image": dictionary(pa, bytes(10**7), 100)}, {}, "more than 64 MiB"),
    "pictures in one page": (
        lambda *_: {"image": [bytes(4 * 10**7)] * 2},
        {"use_dictionary": False},
        "bytes unpacks to 76 MiB",
    ),
    "pictures of numbers": (lambda pa, _: {"image": pa.array([[0] * 10**5] * 10)}, {}, "no column of pictures"),
    "rows of nothing": (
        lambda pa, _: {"image": pa.nulls(NONE, pa.binary()), "label": pa.nulls(NONE, pa.int32())},
        {},
        "more than its size",
    ),
    "paths beside pictures": (
        lambda pa, picture: {
            "image": pa.StructArray.from_arrays(
                [pa.array([picture] * 10), pa.array([LONG * 20] * 10)], ["bytes", "path"]
            )
        },
        {},
        None,
    ),
    "lists of labels": (lambda pa, picture: {"image": [picture] * 10, "label": [["x" * 1000] * 1000] * 10}, {}, None),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_no_more_memory_than_it_should(tmp_path, pyarrow, files, name):
    columns, options, said = BOMBS[name]
    columns = columns(pyarrow, min(files.values(), key=len))
    path = tmp_path / "val.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, store_schema=False, compression="zstd", **options)
    del columns
    assert path.stat().st_size < 100_000
    before = pyarrow.default_memory_pool()
    watched = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(watched)
    try:
        if said is None:
            assert open_pictures(str(tmp_path), "val").read(0)
        else:
            with pytest.raises(SwinQuantError, match=rf"^{path}.*{said}"):
                open_pictures(str(tmp_path), "val").open(0)
    finally:
        pyarrow.set_memory_pool(before)
    assert watched.max_memory() < 200 << 20


def test_metadata_of_many_parts_are_refused(tmp_path, pyarrow, files):
    """Arrow makes an object of 700 bytes of a part, which may take 4 in the file."""
    table = pyarrow.table({"image": list(files.values())[:1]})
    with pyarrow.parquet.ParquetWriter(tmp_path / "val.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(dict.fromkeys(map(str, range(10**5)), ""))
    refused(lambda: open_pictures(str(tmp_path), "val"), "val.parquet: not a readable Parquet file")


@pytest.mark.parametrize("damage", ["footer", "page"])
def test_pages_that_are_none_are_damage(tmp_path, pyarrow, files, damage):
    path = tmp_path / "val.parquet"
    write(pyarrow, path, list(files.values())[:4], [0, 1, 2, 0])
    data = bytearray(path.read_bytes())
    data[slice(-8, -4) if damage == "footer" else slice(4, 12)] = b"\xff" * (4 if damage == "footer" else 8)
    path.write_bytes(data)
    with pytest.raises(SwinQuantError, match=rf"^{path}: not a readable Parquet file: it is damaged"):
        open_pictures(str(tmp_path), "val").open(0)
