"""Tables of pictures: common column names, and every bad line by its number."""

from pathlib import Path

import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.sources import open_pictures

TABLES = {
    "path,label": ("path,label\n", "{path},{number}\n"),
    "no header": ("", "{path},{number}\n"),
    "names": ("file_name,split,class\n", "{path},val,{name}\n"),
    "tabs, windows": ("\ufeffFilename\tLabel\r\n", "{path}\t{number}\r\n"),
    "semicolons, quotes": ("label;id;image\n", '{number};7;"{path}"\n'),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_gives_the_pictures_and_labels_of_the_folders(folders, alike, case):
    header, row = TABLES[case]
    names = [name.split("/")[0] for name in folders.names]
    rows = zip(folders.names, folders.labels, names, strict=True)
    text = header + "".join(row.format(path=path, number=number, name=name) for path, number, name in rows)
    table = folders.folder / "val.csv"
    table.write_text(text, newline="")
    for place in (f"csv:{table}", str(table), str(folders.folder), f"csv:{folders.folder}/{{split}}.csv"):
        pictures = open_pictures(place, "val", num_classes=3)
        alike(pictures)
        assert pictures.names == folders.names
    assert pictures.class_names == (["cat", "dog", "fox"] if "class" in header else ["0", "1", "2"])


def test_a_table_may_lie_beside_the_folder_of_its_pictures(folders, alike, tmp_path):
    (tmp_path / "val").mkdir()
    lines = ["path,label"]
    for number, (path, label) in enumerate(zip(folders.names, folders.labels, strict=True)):
        name = f"val/{number}{Path(path).suffix}"
        (tmp_path / name).write_bytes((folders.folder / path).read_bytes())
        lines.append(f"{name},{label}")
    (tmp_path / "val.csv").write_text("\n".join(lines))
    alike(open_pictures(str(tmp_path), "val", num_classes=3))


def test_a_hugging_face_image_folder_is_its_metadata(folders, alike):
    flat = folders.folder.rename(folders.folder.with_name("val"))
    for file in sorted(flat.glob("*/*")):
        file.rename(flat / f"{file.parent.name}_{file.name}")
    for name in ("cat", "dog", "fox"):
        (flat / name).rmdir()
    (flat / "metadata.csv").write_text("file_name,label\nfox_1.png,fox\ncat_0.png,cat\n")
    pictures = open_pictures(str(flat.parent), "val", num_classes=2)
    assert pictures.names == ["fox_1.png", "cat_0.png"] and pictures.labels == [1, 0]
    assert pictures.class_names == ["cat", "fox"]


def test_named_classes_are_looked_up_where_somebody_has_listed_them(folders):
    table = folders.folder / "val.csv"
    table.write_text("path,label\ncat/0.png,cat\nfox/0.png,fox\n")
    (folders.folder / "classes.txt").write_text("fox\nhen\ncat\n")
    assert open_pictures(f"csv:{table}", "val", num_classes=3).labels == [2, 0]
    table.write_text("path,label\ncat/0.png,cat\nfox/0.png,wolf\n")
    with pytest.raises(SwinQuantError, match=r"val.csv, line 3: 'wolf' is not a class of classes.txt"):
        open_pictures(f"csv:{table}", "val", num_classes=3)


BAD = {
    "no pictures": ("path,label\n", "lists no pictures of split val"),
    "no paths": ("id,label\n1,2\n", "no column of paths among id, label"),
    "too few columns": ("path,label\na.png\n", "line 2: has 1 columns"),
    "no picture": ("a.png,0\nnotes.txt,1\n", "line 2: 'notes.txt' is not the path of a picture"),
    "twice": ("a.png,0\na.png,1\n", "line 2: a.png is listed a second time"),
    "no label": ("a.png,0\nb.png,\n", "line 2: has no label"),
    "label too large": ("a.png,0\n\nb.png,3\n", "line 3: label 3 is outside 0 to 2 .MODEL.NUM_CLASSES is 3"),
    "negative": ("a.png,-1\n", "line 1: label -1 is outside"),
    "open quote": ('a.png,0\n"b.png,1\n', "cannot be read: unexpected end of data"),
    "not UTF-8": (b"a.png,0\n\xff\xfe,1\n", "cannot be read"),
    "endless field": ("a.png," + "9" * 200_000, "field larger than field limit"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path, case):
    text, reason = BAD[case]
    (tmp_path / "val.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SwinQuantError, match=rf"val\.csv.*{reason}"):
        open_pictures(str(tmp_path), "val", num_classes=3)
