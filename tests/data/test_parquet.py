"""Parquet as Hugging Face's `datasets` writes it."""

import json
import pickle

import pytest

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.pictures import UnreadablePicture
from swin_quant.data.sources import open_pictures

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
    with pytest.raises(UnreadablePicture, match="val.parquet/000001: no bytes of it"):
        pictures.read(1)
    with pytest.raises(SwinQuantError, match="000002: label 1 is outside 0 to 0"):
        open_pictures(str(tmp_path), "val", num_classes=1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SwinQuantError, match="val.parquet: not a readable Parquet file"):
        open_pictures(str(tmp_path), "val", num_classes=3)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with pytest.raises(SwinQuantError, match="no column of pictures among text"):
        open_pictures(str(tmp_path), "val", num_classes=3)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "val.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"pyarrow.parquet cannot be imported .*\[data\]"):
        open_pictures(str(tmp_path), "val", num_classes=3)
