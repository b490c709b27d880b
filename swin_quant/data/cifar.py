"""CIFAR-10 and CIFAR-100 in their authors' binary version: records of labels and 3 x 32 x 32 bytes."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import open_plain, read_lines, reason
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.source import DataRequest, DataSource

SIDE = 32
PIXELS = 3 * SIDE * SIDE
VAL = ("val", "test", "validation")
_MAX_RECORDS = 1_000_000


@dataclass(frozen=True)
class _Form:
    """CIFAR-10 or CIFAR-100: folder, files, file of names, and the number of label bytes before a picture, of which the
    last counts."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    labels: int
    classes: int


_FORMS = (
    _Form(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{n}.bin" for n in range(1, 6)),
        "test_batch.bin",
        "batches.meta.txt",
        1,
        10,
    ),
    _Form("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 2, 100),
)


class CifarPictures(Pictures):
    """The records of binary batches, in order, named `<batch>/<number>`; CIFAR-100 with its 100 fine labels.

    Source: the format's description at https://www.cs.toronto.edu/~kriz/cifar.html

    Raises:
        SwinQuantError: a missing or truncated batch, or a label that is no class.
    """

    def __init__(self, files: list[Path], form: _Form) -> None:
        self._form, self._record = form, form.labels + PIXELS
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
        try:
            with open_plain(path) as file:
                file.seek(number * self._record + self._form.labels)
                data = file.read(PIXELS)
        except OSError as error:
            raise UnreadablePicture(f"{self.names[index]}: {reason(error)}") from error
        if len(data) < PIXELS:
            raise UnreadablePicture(f"{self.names[index]}: {path} is shorter than it was")
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


def _detect(request: DataRequest) -> tuple[list[Path], _Form] | None:
    for form in _FORMS:
        for folder in (Path(request.place), Path(request.place, form.folder)):
            if any((folder / name).is_file() for name in (form.train[0], form.test)):
                wanted = [form.test] if request.split in VAL else list(form.train) if request.split == "train" else []
                return [folder / name for name in wanted], form
    return None


def _find(request: DataRequest) -> list[Path]:
    if not os.path.isdir(request.place) or request.folder.is_dir():
        return []
    if found := _detect(request):
        return found[0]
    return []


def _open(files: list[Path], request: DataRequest) -> CifarPictures:
    found = _detect(request)
    assert found is not None  # `_find` has just found them
    return CifarPictures(files, found[1])


SOURCE = DataSource("cifar", "CIFAR's binary batches (data_batch_1.bin, ...)", _find, _open)
