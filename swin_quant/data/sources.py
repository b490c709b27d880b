"""Open the pictures of a data path and split, whatever the kind of source, or the digits of scikit-learn."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean, is_offered, listed
from swin_quant.base.extras import library
from swin_quant.base.files import near
from swin_quant.base.reading import reads
from swin_quant.data.archives import ShardPictures, ZipPictures
from swin_quant.data.cifar import BINARY, PICKLED, CifarPictures, find_cifar
from swin_quant.data.class_names import fit, in_order, stated
from swin_quant.data.csv_table import TablePictures, find_tables
from swin_quant.data.folder import FolderPictures, open_wnids
from swin_quant.data.ilsvrc import IlsvrcPictures, find_ilsvrc
from swin_quant.data.parquet import ParquetPictures
from swin_quant.data.pictures import Pictures, is_picture
from swin_quant.data.source import DataRequest, list_files, subfolders

DIGITS = "digits"
TRAIN = "train"
SPLITS = ("train", "val")
_VAL_EVERY = 5  # every fifth picture of each class is for validation


@dataclass(frozen=True)
class DataSource:
    """A kind of data set. `what`: its files, in messages.

    `find` gives the files to read, none if the place holds nothing of this kind; `open` reads them. `names_own`: each
    split states its own classes.
    """

    what: str
    find: Callable[[DataRequest], list[Path]]
    open: Callable[[list[Path], DataRequest], Pictures]
    names_own: bool = False


# The kinds of data set by the prefix that selects one, `prefix:PLACE`, in the order tried.
KINDS = {
    "wnids": DataSource(
        "folders named by wnid (n01440764, ...)",
        lambda request: [request.folder] if request.prefix and subfolders(request.folder) else [],
        open_wnids,
    ),
    "ilsvrc": DataSource("ILSVRC2012_val_*.JPEG in one folder, and their labels", find_ilsvrc, IlsvrcPictures),
    "csv": DataSource("table of path and label (<split>.csv)", find_tables, TablePictures, names_own=True),
    "wds": DataSource("tar shards of key.jpg and key.cls", partial(list_files, ending=".tar"), ShardPictures),
    "parquet": DataSource("Parquet files of pictures", partial(list_files, ending=".parquet"), ParquetPictures, True),
    "cifar": DataSource(
        "CIFAR's binary batches (data_batch_1.bin, ...)", partial(find_cifar, forms=BINARY), CifarPictures
    ),
    "cifar-python": DataSource(
        "CIFAR's python batches (data_batch_1, ...)", partial(find_cifar, forms=PICKLED), CifarPictures
    ),
}


@reads("data set")
def open_pictures(
    data_path: str,
    split: str,
    *,
    zip_mode: bool = False,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
) -> Pictures:
    """Open one split of `data_path`: class folders, a zip and its map, the digits, or one of KINDS.

    Args:
        data_path: `‹data_path›/<split>/<class>/*`, `‹data_path›/<split>.zip` and `<split>_map.txt`, "digits", or
            another kind's files, detected or named by its prefix: `csv:my.csv`.
        num_classes: the classes of the model. None: labels are not needed and not checked, and the pictures may
            lie flat in `‹data_path›/<split>` or `‹data_path›`.
        class_names: the model's, if known: labels are matched by name (`class_names.fit`). Otherwise the training
            pictures' names at the same place.
        zip_mode: the data must be a zip; without it, `is_archive` decides.

    Raises:
        UsageError: no data path, or ‹zip› for a folder.
        SwinQuantError: data that are missing, empty, damaged, or of another number of classes.
    """
    if not data_path:
        raise UsageError("no pictures: give ‹data_path› a folder of pictures, or 'digits'")
    labelled = num_classes is not None
    if data_path == DIGITS:
        pictures: Pictures = DigitsPictures(split)
    elif zip_mode or is_archive(data_path, split):
        _find(Path(data_path), split, True, labelled)
        pictures = ZipPictures(Path(data_path), split, num_classes)
    elif found := _detect(request := _request(data_path, split, num_classes)):
        source, files = found
        pictures = source.open(files, request)
    else:
        root = Path(data_path)
        pictures = FolderPictures(_find(root, split, zip_mode, labelled), labelled, root)
    if num_classes is not None:
        names, whose = class_names, "the model"
        if not names and split != TRAIN and (names := _trained_on(data_path, num_classes)):
            whose = TRAIN
        fit(pictures, num_classes, names, f"{data_path}: {split}", whose)
    return pictures


def _trained_on(data_path: str, classes: int) -> list[str]:
    """The class names of the training pictures beside another split, if their kind states class names."""
    if folders := subfolders(Path(data_path, TRAIN)):
        return stated(in_order(folders), classes)
    request = _request(data_path, TRAIN, None)
    try:
        source, files = (_detect(request) if request.has_splits else None) or (None, [])
        return stated(source.open(files, request).class_names, classes) if source and source.names_own else []
    except SwinQuantError:  # the user named another split
        return []


def is_archive(data_path: str, split: str) -> bool:
    """Whether the split is a zip with its map, and no folder."""
    root = Path(data_path)
    try:
        return not (root / split).is_dir() and all((root / f"{split}{end}").is_file() for end in (".zip", "_map.txt"))
    except OSError:  # a name that is too long: opening it will fail
        return False


def is_data_set(data_path: str) -> bool:
    """Whether the path alone shows that this is a data set with labels, not a folder or file of pictures."""
    request = _request(data_path, "val", None)
    if data_path == DIGITS or request.prefix:
        return True
    return not os.path.isdir(data_path) and _detect(request) is not None


def has_split(cfg: CfgNode, split: str) -> bool:
    """Whether the config's data path holds `split`, as a zip if DATA.ZIP_MODE is set."""
    return place_has(cfg.DATA.DATA_PATH, split, cfg.DATA.ZIP_MODE)


def place_has(data_path: str, split: str, zip_mode: bool = False) -> bool:
    """Whether a place of any kind holds `split`."""
    if data_path == DIGITS or is_archive(data_path, split):
        return True
    if (Path(data_path) / (f"{split}.zip" if zip_mode else split)).exists():
        return True
    request = _request(data_path, split, None)
    if zip_mode or not request.has_splits:
        return False
    files = next(filter(None, (source.find(request) for source in _kinds(request))), [])
    return bool(files) and all(file.exists() for file in files)


def _request(data_path: str, split: str, classes: int | None) -> DataRequest:
    prefix, mark, place = data_path.partition(":")
    if mark and prefix in KINDS:
        return DataRequest(place, split, classes, prefix)
    return DataRequest(data_path, split, classes)


def _kinds(request: DataRequest) -> list[DataSource]:
    return [KINDS[request.prefix]] if request.prefix else list(KINDS.values())


def _detect(request: DataRequest) -> tuple[DataSource, list[Path]] | None:
    """The kind of data at the place, and its files; None for folders, or nothing."""
    for source in _kinds(request):
        if files := source.find(request):
            return source, files
        if request.prefix:
            raise SwinQuantError(f"{request.place}: split {request.split}: found no {source.what}")
    return None


def _find(root: Path, split: str, zip_mode: bool, labelled: bool) -> Path:
    """Return the folder or archive of the split, or the root if it may and does hold pictures itself."""
    try:
        if not root.is_dir():
            problem = "is not a folder" if root.exists() else "no such folder"
            remedy = "" if root.exists() else near(root)
            prefix, mark, _ = str(root).partition(":")
            kinds = f"; a prefix is one of {', '.join(KINDS)}" if mark and prefix.replace("-", "").isalnum() else ""
            remedy = remedy or kinds or "; set ‹data_path› to the folder that holds the splits"
            raise SwinQuantError(f"{root}: {problem}{remedy}")
        folders = {item.name: item for item in root.iterdir() if item.is_dir()}
        archives = {item.stem: item for item in root.glob("*.zip")}
        flat = any(is_picture(item.name) for item in root.iterdir())
    except OSError as error:
        raise SwinQuantError(f"{root}: cannot be read: {error.strerror}") from error
    wanted = archives if zip_mode else folders
    if split in wanted:
        return wanted[split]
    if split in folders:
        raise UsageError(f"{root}: {split} is a folder: drop ‹zip›")
    if flat and not labelled and not zip_mode:
        return root
    layout = f"{split}.zip with {split}_map.txt" if zip_mode else f"folder {split}, nor {split}.zip with its map"
    held = listed([*sorted(folders), *sorted(item.name for item in archives.values())])
    remedy = did_you_mean(split, [*folders, *archives])
    if (other := next((one for one in SPLITS if place_has(str(root), one)), None)) and not remedy:
        remedy = f": give ‹split› {other}, or put pictures into {split}/" if is_offered("split") else ""
    if root.name in SPLITS and place_has(str(root.parent), split, zip_mode):
        remedy = f": give ‹data_path› {root.parent}"
    if not remedy and not zip_mode:
        remedy = ": it takes train/<class>/* and val/<class>/* (docs/data.md)"
    raise SwinQuantError(f"{root}: has no {layout}; it holds {held or 'neither folders nor archives'}{remedy}")


class DigitsPictures(Pictures):
    """1,797 pictures of 8 x 8 grey levels in ten classes, 80 % `train`, 20 % `val`, the classes balanced in both.

    Source: UCI "Optical Recognition of Handwritten Digits", as bundled with scikit-learn.
    """

    def __init__(self, split: str) -> None:
        if split not in SPLITS:
            raise UsageError(f"digits: no split {split!r}; choose one of {', '.join(SPLITS)}")
        digits = library("sklearn.datasets", "demo").load_digits()
        ordinals = [count() for _ in digits.target_names]
        ordinal = np.array([next(ordinals[label]) for label in digits.target])
        chosen = np.flatnonzero((ordinal % _VAL_EVERY == _VAL_EVERY - 1) == (split == "val"))
        self._levels = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # 0 to 16 -> 0 to 255
        self.names = [f"digits/{index:04d}" for index in chosen]
        self.labels = digits.target[chosen].tolist()
        self.class_names = [str(name) for name in digits.target_names]

    def open(self, index: int) -> Image.Image:
        """Return one picture, 8 x 8, mode L."""
        return Image.fromarray(self._levels[index])
