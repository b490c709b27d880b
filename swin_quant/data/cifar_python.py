"""CIFAR-10 and CIFAR-100 in their python version: pickles, read as data and never unpickled."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from swin_quant.base import pickled
from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import read_bounded
from swin_quant.data.cifar import PIXELS, SIDE, CifarForm, batches_of, form_of
from swin_quant.data.pictures import Pictures, printable
from swin_quant.data.source import DataSource

_MAX_BYTES = 256 << 20  # for a batch: CIFAR-100's training pictures are 155 MB
_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
_FORMS = (
    CifarForm("cifar-10-batches-py", _TEN, "test_batch", "batches.meta", 10, keys=("labels", "label_names")),
    CifarForm("cifar-100-python", ("train",), "test", "meta", 100, keys=("fine_labels", "fine_label_names")),
)


class PickledCifarPictures(Pictures):
    """The pictures of pickled batches, in order, named `<batch>/<number>`; CIFAR-100 with its 100 fine labels.

    Raises:
        SwinQuantError: a batch that is missing, truncated or no pickle, or a wrong number of labels.
    """

    def __init__(self, files: list[Path]) -> None:
        form = form_of(files[0], _FORMS)
        key, names_key = form.keys
        self._pixels: list[NDArray[np.uint8]] = []
        self.names, self.labels = [], []
        for file in files:
            pixels, found = _read(file, key)
            labels = [label for label in found if type(label) is int]
            if not labels or len(pixels) != PIXELS * len(labels):
                raise SwinQuantError(f"{file}: {len(pixels)} bytes of pictures, but {len(labels)} labels")
            if not 0 <= min(labels) <= max(labels) < form.classes:
                raise SwinQuantError(
                    f"{file}: labels from {min(labels)} to {max(labels)}: must be of {form.classes} classes"
                )
            self._pixels += list(np.frombuffer(pixels, np.uint8).reshape(-1, 3, SIDE, SIDE))
            self.names += [f"{file.name}/{number:05d}" for number in range(len(labels))]
            self.labels += labels
        path = files[0].parent / form.names
        _, names = _read(path, names_key) if path.is_file() else (b"", [])
        names = names if len(names) == form.classes else list(range(form.classes))
        self.class_names = [printable(_text(name)) for name in names]

    def open(self, index: int) -> Image.Image:
        """Return one picture, 32 x 32, RGB."""
        return Image.fromarray(np.ascontiguousarray(self._pixels[index].transpose(1, 2, 0)))


def _read(path: Path, key: str) -> tuple[bytes, list[Any]]:
    """The bytes of the pictures in a pickled dictionary, and its list under `key`; empty where there are none."""
    data = read_bounded(path, "batch of CIFAR", _MAX_BYTES)
    try:
        content = pickled.mapping(pickled.load(io.BytesIO(data), _stand_in))
        named = {_text(key): value for key, value in content.items()}
        array = named.get("data")
        state = list(array.values()) if isinstance(array, pickled.Attributes) else []
        pixels = state[-1] if state else b""
        return pixels if isinstance(pixels, bytes) else _text(pixels).encode("latin-1"), pickled.items(
            named.get(key, [])
        )
    except ValueError as error:
        raise SwinQuantError(f"{path}: is no batch of CIFAR, or is cut off: {one_line(str(error))[:200]}") from error


def _stand_in(name: str) -> pickled.Known:
    """Text for what python 3 wrote of bytes; else an object of numpy, whose last part is its values."""
    if name == "_codecs.encode":
        return pickled.Known(name, lambda text, *how: text)
    return pickled.Known(name, lambda *arguments: pickled.Attributes())


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


SOURCE = DataSource(
    "cifar-python",
    "CIFAR's python batches (data_batch_1, ...)",
    lambda request: batches_of(request, _FORMS),
    lambda files, request: PickledCifarPictures(files),
)
