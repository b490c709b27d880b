"""CIFAR-10 and CIFAR-100 in their authors' binary version: records of labels and 3 x 32 x 32 bytes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import open_plain, read_lines
from swin_quant.data.pictures import Pictures, bytes_of
from swin_quant.data.source import DataRequest, DataSource

SIDE = 32
PIXELS = 3 * SIDE * SIDE
_VAL = ("val", "test", "validation")
_MAX_RECORDS = 1_000_000


@dataclass(frozen=True)
class CifarForm:
    """CIFAR-10 or CIFAR-100: its folder, training files, test file, file of class names, and number of classes.

    `labels`: in a binary batch the bytes before a picture, of which the last is the label. `keys`: in a pickled one the
    keys of its labels and of the class names; its folder is known by the file of names.
    """

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    classes: int
    labels: int = 0
    keys: tuple[str, ...] = ()


_TEN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_FORMS = (
    CifarForm("cifar-10-batches-bin", _TEN, "test_batch.bin", "batches.meta.txt", 10, labels=1),
    CifarForm("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 100, labels=2),
)


def batches_of(request: DataRequest, forms: Sequence[CifarForm]) -> list[Path]:
    """The files of a split at a place, or in CIFAR's own folder there; none for a folder of splits."""
    if not os.path.isdir(request.place) or request.folder.is_dir():
        return []
    for form in forms:
        for folder in (Path(request.place), Path(request.place, form.folder)):
            is_there = any((folder / name).is_file() for name in (form.train[0], form.test))
            if is_there and (not form.keys or (folder / form.names).is_file()):
                wanted = (form.test,) if request.split in _VAL else form.train if request.split == "train" else ()
                return [folder / name for name in wanted]
    return []


def form_of(file: Path, forms: Sequence[CifarForm]) -> CifarForm:
    """The form that has a file of this name."""
    return next(form for form in forms if file.name in (*form.train, form.test))


class CifarPictures(Pictures):
    """The records of binary batches, in order, named `<batch>/<number>`; CIFAR-100 with its 100 fine labels.

    Source: the format's description at https://www.cs.toronto.edu/~kriz/cifar.html

    Raises:
        SwinQuantError: a missing or truncated batch, or a label that is no class.
    """

    def __init__(self, files: list[Path]) -> None:
        self._form = form = form_of(files[0], _FORMS)
        self._record = form.labels + PIXELS
        self._places: list[tuple[Path, int]] = []
        self.names, self.labels = [], []
        for file in files:
            for number, label in enumerate(self._read_labels(file)):
                self._places.append((file, number))
                self.names.append(f"{file.name}/{number:05d}")
                self.labels.append(label)
        if not self.names:
            raise SwinQuantError(f"{files[0]}: is empty")
        path = files[0].parent / form.names
        names = read_lines(path, "list of class names") if path.is_file() else []
        if names and len(names) != form.classes:
            raise SwinQuantError(f"{path}: {len(names)} names of {form.classes} classes")
        self.class_names = names or list(map(str, range(form.classes)))

    def open(self, index: int) -> Image.Image:
        """Return one picture, 32 x 32, RGB. Raises UnreadablePicture."""
        path, number = self._places[index]
        data = bytes_of(self.names[index], path, number * self._record + self._form.labels, PIXELS)
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(3, SIDE, SIDE).transpose(1, 2, 0).copy())

    def _read_labels(self, path: Path) -> list[int]:
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size % self._record:
                    raise SwinQuantError(f"{path}: {size} bytes are not records of {self._record}: it is cut off")
                if size // self._record > _MAX_RECORDS:
                    raise SwinQuantError(f"{path}: more than {_MAX_RECORDS:,} records: it is no batch of CIFAR")
                labels = []
                for number in range(size // self._record):
                    file.seek(number * self._record + self._form.labels - 1)
                    labels.append(file.read(1)[0])
        except FileNotFoundError as error:
            raise SwinQuantError(f"{path}: no such batch of CIFAR") from error
        except (OSError, IndexError) as error:
            raise SwinQuantError(f"{path}: cannot be read: {error}") from error
        for number, label in enumerate(labels):
            if label >= self._form.classes:
                raise SwinQuantError(f"{path}, record {number}: label {label} is outside 0 to {self._form.classes - 1}")
        return labels


SOURCE = DataSource(
    "cifar",
    "CIFAR's binary batches (data_batch_1.bin, ...)",
    lambda request: batches_of(request, _FORMS),
    lambda files, request: CifarPictures(files),
)
