"""ImageNet's validation pictures as published: flat, ILSVRC2012_val_00000001.JPEG ..., with labels in a file.

Label files use three numberings. The devkit's ILSVRC2012_validation_ground_truth.txt has its own ILSVRC2012_IDs (1 to
1000), which only the devkit's meta.mat, or map_clsloc.txt in later devkits, translates. val.txt counts from 0 in the
order of synset_words.txt, which is that of sorted wnids. The other files name wnids.
"""

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library
from swin_quant.base.files import read_bounded, read_lines
from swin_quant.base.reading import reading
from swin_quant.data.class_names import ILSVRC_CLASSES, is_wnid, list_wnids
from swin_quant.data.folder import FolderPictures, Walk
from swin_quant.data.pictures import printable
from swin_quant.data.source import DataRequest, subfolders

PICTURE = re.compile(r"ILSVRC2012_val_[0-9]{8}\.(?:JPEG|jpeg|jpg|JPG|png)")
# Each line begins with a wnid, in published order
_WORDS = ("synset_words.txt", "LOC_synset_mapping.txt", "synsets.txt")
_MAX_META_BYTES, _MAX_INFLATED_BYTES = 8 << 20, 32 << 20
_COMPRESSED = 15  # miCOMPRESSED of MAT files
_KIND = "list of labels"

Labels = dict[str, str]
"""The stem of a picture's name -> its wnid."""


class IlsvrcPictures(FolderPictures):
    """ILSVRC2012's validation pictures, all or some, in a flat `folder`, in the order of their numbers.

    Labels are indices into the sorted list of 1000 wnids, as in published models. They come from the first of val.txt,
    LOC_val_solution.csv, imagenet_2012_validation_synset_labels.txt and ILSVRC2012_validation_ground_truth.txt in one
    place: the folder, the data path, its `data`, its devkits. Numbers are looked up in the synset_words.txt there.

    Raises:
        SwinQuantError: no such file, one without some pictures or with unknown classes, or ids that nothing translates.
    """

    def __init__(self, files: Sequence[Path], request: DataRequest) -> None:
        self.folder = folder = files[0]
        root = Path(request.place)
        kits = [kit for kit in sorted(root.glob("*devkit*")) if kit.is_dir()]
        places = [folder, root, root / "data", *kits, *(kit / "data" for kit in kits)]
        walk = Walk([folder, root])
        self._files = list(filter(PICTURE.fullmatch, walk.listed(folder)[1]))
        walk.tell(folder)
        self.names = list(self._files)
        self.class_names = list(list_wnids(ILSVRC_CLASSES) or ())
        if (path := _first(_FORMS, places)) is None:
            raise SwinQuantError(f"{folder}: no labels of its pictures: put one of {', '.join(_FORMS)} beside it")
        labels = _FORMS[path.name](path, places, self.class_names)
        index = {wnid: number for number, wnid in enumerate(self.class_names)}
        self.labels = []
        for name in self._files:
            wnid = labels.get(name.partition(".")[0])
            if wnid is None:
                raise SwinQuantError(f"{path}: has no label for {name}")
            if wnid not in index:
                raise SwinQuantError(f"{path}: {name}: {printable(wnid)[:40]!r} is none of ImageNet's 1000 wnids")
            self.labels.append(index[wnid])


def _first(names: Iterable[str], places: list[Path]) -> Path | None:
    """The first of these files that lies in one of the places."""
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _numbered_names(path: Path, places: list[Path], order: list[str]) -> Labels:
    """Lines of a name and a number from 0: an index into synset_words.txt, else into the sorted wnids."""
    if words := _first(_WORDS, places):
        order = [line.split()[0] for line in read_lines(words, "list of wnids")]
        if len(order) != ILSVRC_CLASSES or not all(map(is_wnid, order)):
            raise SwinQuantError(f"{words}: is no list of 1000 wnids, one a line")
    found = {}
    for number, line in enumerate(read_lines(path, _KIND), 1):
        name, _, label = line.replace("\t", " ").rpartition(" ")
        if not re.fullmatch("[0-9]{1,4}", label) or int(label) >= len(order):
            raise SwinQuantError(f"{path}, line {number}: expected a name and a number from 0 to {len(order) - 1}")
        found[Path(name.strip()).name.partition(".")[0]] = order[int(label)]
    return found


def _ground_truth(path: Path, places: list[Path], order: list[str]) -> Labels:
    """The devkit's lines: an ILSVRC2012_ID each, whose wnid is in the devkit's own table."""
    readers: dict[str, Callable[[Path], Iterable[tuple[str, str]]]] = {
        "meta.mat": _matlab,
        "map_clsloc.txt": lambda path: (
            (row[1], row[0]) for row in map(str.split, read_lines(path, "table of wnids")) if len(row) > 1
        ),
    }
    table = _first(readers, places)
    if table is None:
        ids = "numbers classes by the devkit's ids, not by sorted wnids"
        raise SwinQuantError(f"{path}: {ids}: put the devkit's {' or '.join(readers)} beside it")
    wnids = {number: wnid for number, wnid in readers[table.name](table) if is_wnid(wnid)}
    if missing := [n for n in range(1, ILSVRC_CLASSES + 1) if str(n) not in wnids]:
        raise SwinQuantError(f"{table}: has no wnid of ILSVRC2012_ID {missing[0]}")
    lines = read_lines(path, _KIND)
    for number, line in enumerate(lines, 1):
        if line not in wnids:
            raise SwinQuantError(f"{path}, line {number}: {printable(line)[:40]!r} is no ILSVRC2012_ID")
    return _at([wnids[line] for line in lines])


def _at(wnids: list[str]) -> Labels:
    return {f"ILSVRC2012_val_{number:08d}": wnid for number, wnid in enumerate(wnids, 1)}


_FORMS: dict[str, Callable[[Path, list[Path], list[str]], Labels]] = {
    "val.txt": _numbered_names,
    "LOC_val_solution.csv": lambda path, *_: {  # the stem, a comma, the wnid and its box
        row[0]: row[1] for line in read_lines(path, _KIND) if len(row := line.replace(",", " ").split()) > 1
    },
    "imagenet_2012_validation_synset_labels.txt": lambda path, places, order: _at(read_lines(path, _KIND)),
    "ILSVRC2012_validation_ground_truth.txt": _ground_truth,
}


def _matlab(path: Path) -> list[tuple[str, str]]:
    content = read_bounded(path, "table of wnids", _MAX_META_BYTES)
    order = "<" if content[126:128] == b"IM" else ">"
    at, left = 128, _MAX_INFLATED_BYTES  # version 5: behind 128 bytes, which end with the byte order, elements
    with reading(path, "meta.mat of the devkit"):
        while at + 8 <= len(content):
            kind, size = struct.unpack_from(f"{order}II", content, at)
            if kind == _COMPRESSED:  # zlib packs thousandfold
                left -= len(zlib.decompressobj().decompress(content[at + 8 : at + 8 + size], left + 1))
            if left < 0:
                raise ValueError(f"it holds more than {_MAX_INFLATED_BYTES >> 20} MB")
            at += 8 + size
        table: Any = library("scipy.io", "data").loadmat(BytesIO(content), variable_names=["synsets"], squeeze_me=True)
        return [(str(int(row["ILSVRC2012_ID"])), str(row["WNID"])) for row in table["synsets"]]


def find_ilsvrc(request: DataRequest) -> list[Path]:
    """The folder of a split that holds ILSVRC2012's validation pictures; none for any other."""
    if request.split not in ("val", "validation") or (request.classes is None and not request.prefix):
        return []
    for folder in (request.folder, Path(request.place)):
        with contextlib.suppress(OSError):
            holds_classes = folder == request.folder and subfolders(folder)
            if not holds_classes and any(PICTURE.fullmatch(item.name) for item in os.scandir(folder)):
                return [folder]
    return []
