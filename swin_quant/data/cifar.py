"""CIFAR-10 and CIFAR-100 in their authors' binary and python versions; pickles are read as data, never unpickled.

Source: the formats' description at https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from swin_quant.base import pickled
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_bounded, read_lines
from swin_quant.base.reading import reading
from swin_quant.data.pictures import Pictures, printable
from swin_quant.data.source import DataRequest

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_VAL = ("val", "test", "validation")
_MAX_BYTES = 256 << 20  # for a batch: CIFAR-100's training pictures are 155 MB


@dataclass(frozen=True)
class CifarForm:
    """A version of a data set: its folder, training files, test file, file of class names, and number of classes.

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


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
BINARY = (
    CifarForm("cifar-10-batches-bin", tuple(f"{n}.bin" for n in _TEN), "test_batch.bin", "batches.meta.txt", 10, 1),
    CifarForm("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 100, 2),
)
PICKLED = (
    CifarForm("cifar-10-batches-py", _TEN, "test_batch", "batches.meta", 10, keys=("labels", "label_names")),
    CifarForm("cifar-100-python", ("train",), "test", "meta", 100, keys=("fine_labels", "fine_label_names")),
)


class CifarPictures(Pictures):
    """The pictures of batches, in order, named `<batch>/<number>`, held in memory; CIFAR-100 with its 100 fine labels.

    Raises:
        SwinQuantError: a batch that is missing, truncated or none, or a label that is no class.
    """

    def __init__(self, files: Sequence[Path], request: DataRequest) -> None:
        form = next(one for one in (*BINARY, *PICKLED) if files[0].name in (*one.train, one.test))
        self._pixels: list[NDArray[np.uint8]] = []
        self.names, self.labels = [], []
        for file in files:
            if not file.is_file():
                raise SwinQuantError(f"{file}: no such batch of CIFAR")
            if form.keys:
                content, written = _content(file, form.keys[0])
                array = content.get("data")
                state = list(array.values()) if isinstance(array, pickled.Attributes) else []
                pixels = state[-1] if state else b""
                pixels = pixels if isinstance(pixels, bytes) else _text(pixels).encode("latin-1", "replace")
                labels = [label for label in written if type(label) is int]
                if not labels or len(pixels) != _PIXELS * len(labels):
                    raise SwinQuantError(f"{file}: {len(pixels)} bytes of pictures, but {len(labels)} labels")
                found = np.frombuffer(pixels, np.uint8)
            else:
                data, size = read_bounded(file, "batch of CIFAR", _MAX_BYTES), form.labels + _PIXELS
                if len(data) % size:
                    raise SwinQuantError(f"{file}: {len(data)} bytes are not records of {size}: it is cut off")
                records = np.frombuffer(data, np.uint8).reshape(-1, size)
                found, labels = records[:, form.labels :], records[:, form.labels - 1].tolist()
            for number, label in enumerate(labels):
                if not 0 <= label < form.classes:
                    raise SwinQuantError(f"{file}, record {number}: label {label} is outside 0 to {form.classes - 1}")
            self._pixels += list(found.reshape(-1, *_SHAPE))
            self.names += [f"{file.name}/{number:05d}" for number in range(len(labels))]
            self.labels += labels
        if not self.names:
            raise SwinQuantError(f"{files[0]}: is empty")
        path, names = files[0].parent / form.names, list[str]()
        if path.is_file() and form.keys:
            names = [printable(_text(name)) for name in _content(path, form.keys[1])[1]]
        elif path.is_file():
            names = read_lines(path, "list of class names")
        if names and len(names) != form.classes:
            raise SwinQuantError(f"{path}: {len(names)} names of {form.classes} classes")
        self.class_names = names or list(map(str, range(form.classes)))

    def open(self, index: int) -> Image.Image:
        """Return one picture, 32 x 32, RGB."""
        return Image.fromarray(np.ascontiguousarray(self._pixels[index].transpose(1, 2, 0)))


class _Reader(pickled.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Text for what python 3 wrote of bytes; else an object of numpy, whose last part is its values."""
        is_text = (module, name) == ("_codecs", "encode")
        return (lambda text, *how: text) if is_text else lambda *arguments: pickled.Attributes()


def _content(path: Path, key: str) -> tuple[dict[str, Any], list[Any]]:
    """The dictionary in a pickle, and its list under `key`."""
    data = read_bounded(path, "batch of CIFAR", _MAX_BYTES)
    with reading(path, "batch of CIFAR"):
        content = {_text(name): value for name, value in pickled.mapping(_Reader(io.BytesIO(data)).load()).items()}
        return content, pickled.items(content.get(key, []))


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def find_cifar(request: DataRequest, forms: Sequence[CifarForm]) -> list[Path]:
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
