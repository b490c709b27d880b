"""CIFAR-10 and CIFAR-100 in their python version: pickles, read opcode by opcode and never unpickled."""

import os
import pickletools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import read_bounded
from swin_quant.data.cifar import PIXELS, SIDE, VAL
from swin_quant.data.pictures import Pictures, printable
from swin_quant.data.source import DataRequest, DataSource

_MAX_BYTES = 256 << 20  # for a batch: CIFAR-100's training pictures are 155 MB
_FOLDERS = {  # folder -> training files, test file, file of names, key of labels, key of names, classes
    "cifar-10-batches-py": (
        tuple(f"data_batch_{n}" for n in range(1, 6)),
        "test_batch",
        "batches.meta",
        "labels",
        "label_names",
        10,
    ),
    "cifar-100-python": (("train",), "test", "meta", "fine_labels", "fine_label_names", 100),
}
_TEXTS = {"BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINUNICODE", "SHORT_BINUNICODE"}
_NUMBERS = {"BININT", "BININT1", "BININT2"}


@dataclass(frozen=True)
class _Read:
    """The content of a pickle: its longest string, and the numbers and strings that follow each key."""

    longest: bytes
    numbers: dict[str, list[int]]
    texts: dict[str, list[str]]


class PickledCifarPictures(Pictures):
    """The pictures of pickled batches, in order, named `<batch>/<number>`; CIFAR-100 with its 100 fine labels.

    Raises:
        SwinQuantError: a batch that is missing, truncated or no pickle, or a wrong number of labels.
    """

    def __init__(self, files: list[Path]) -> None:
        _, _, meta, key, names_key, classes = _FOLDERS[_form(files[0])]
        self._pixels: list[NDArray[np.uint8]] = []
        self.names, self.labels = [], []
        for file in files:
            found = _read(file, key)
            labels = found.numbers.get(key, [])
            if not labels or len(found.longest) != PIXELS * len(labels):
                raise SwinQuantError(f"{file}: {len(found.longest)} bytes of pictures, but {len(labels)} labels")
            if not 0 <= min(labels) <= max(labels) < classes:
                raise SwinQuantError(
                    f"{file}: labels from {min(labels)} to {max(labels)}: must be of {classes} classes"
                )
            self._pixels += list(np.frombuffer(found.longest, np.uint8).reshape(-1, 3, SIDE, SIDE))
            self.names += [f"{file.name}/{number:05d}" for number in range(len(labels))]
            self.labels += labels
        path = files[0].parent / meta
        names = _read(path, names_key).texts.get(names_key, []) if path.is_file() else []
        self.class_names = [printable(n) for n in names] if len(names) == classes else list(map(str, range(classes)))

    def open(self, index: int) -> Image.Image:
        """Return one picture, 32 x 32, RGB."""
        return Image.fromarray(np.ascontiguousarray(self._pixels[index].transpose(1, 2, 0)))


def _read(path: Path, key: str) -> _Read:
    """The longest string of a pickle, and the strings and numbers between the string `key` and the dict's next key."""
    data = read_bounded(path, "batch of CIFAR", _MAX_BYTES)
    longest, numbers, texts = b"", dict[str, list[int]](), dict[str, list[str]]()
    inside = False
    try:
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name in _TEXTS:
                text = value if isinstance(value, str) else bytes(value or b"").decode("latin-1")
                if len(text) > max(len(longest), PIXELS - 1):
                    longest, inside = text.encode("latin-1"), False
                elif text == key:
                    inside = True
                elif inside and not numbers:
                    texts.setdefault(key, []).append(text)
            elif inside and opcode.name in _NUMBERS and isinstance(value, int):
                numbers.setdefault(key, []).append(value)
            elif inside and opcode.name in ("APPENDS", "SETITEM", "SETITEMS") and (numbers or texts):
                inside = False
    except Exception as error:  # mostly ValueError; decoding, int() and struct raise other errors
        raise SwinQuantError(f"{path}: is no batch of CIFAR, or is cut off: {one_line(str(error))[:200]}") from error
    return _Read(longest, numbers, texts)


def _form(file: Path) -> str:
    return next(form for form, (train, test, *_) in _FOLDERS.items() if file.name in (*train, test))


def _find(wanted: DataRequest) -> list[Path]:
    if not os.path.isdir(wanted.place) or wanted.folder.is_dir():
        return []
    for form, (train, test, meta, *_) in _FOLDERS.items():
        for folder in (Path(wanted.place), Path(wanted.place, form)):
            if (folder / meta).is_file() and any((folder / name).is_file() for name in (train[0], test)):
                names = [test] if wanted.split in VAL else list(train) if wanted.split == "train" else []
                return [folder / name for name in names]
    return []


SOURCE = DataSource(
    "cifar-python",
    "CIFAR's python batches (data_batch_1, ...)",
    _find,
    lambda files, wanted: PickledCifarPictures(files),
)
