"""Turn written labels, numbers or names, into class indices and class names."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_lines
from swin_quant.data.pictures import printable

CLASSES_FILE = "classes.txt"
MAX_CLASSES = 1_000_000  # if the model's number of classes is unknown


def classed(
    written: Sequence[str | None], classes: int | None, folder: Path, where: Callable[[int], str]
) -> tuple[list[int], list[str]]:
    """Indices and class names. Numbers are indices; names are looked up in `<folder>/classes.txt` if it exists, else in
    their own sorted list.

    Args:
        written: one label a picture; None is no label, and becomes -1 unless the model's `classes` are known.
        where: the file and line of the label at an index, for errors.

    Raises:
        SwinQuantError: names the place of the first wrong label.
    """
    known = [label for label in written if label is not None]
    if classes is not None and len(known) < len(written):
        raise SwinQuantError(f"{where(written.index(None))}: has no label")
    path = folder / CLASSES_FILE
    names = read_lines(path, "list of class names") if os.path.lexists(path) else None
    if all(re.fullmatch(r"-?[0-9]{1,9}", label) for label in known):
        return _numbers(written, classes, names, where)
    names = names or sorted(set(known))
    index = {name: number for number, name in enumerate(names)}
    for place, label in enumerate(written):
        if label is not None and label not in index:
            raise SwinQuantError(f"{where(place)}: {printable(label)[:80]!r} is not a class of {path.name}")
    return [-1 if label is None else index[label] for label in written], [printable(name) for name in names]


def _numbers(
    written: Sequence[str | None], classes: int | None, names: list[str] | None, where: Callable[[int], str]
) -> tuple[list[int], list[str]]:
    limit = classes or (len(names) if names else MAX_CLASSES)
    labels = [-1 if label is None else int(label) for label in written]
    for place, label in enumerate(labels):
        if written[place] is not None and not 0 <= label < limit:
            why = f" (MODEL.NUM_CLASSES is {classes})" if classes else ""
            raise SwinQuantError(f"{where(place)}: label {label} is outside 0 to {limit - 1}{why}")
    return labels, names or list(map(str, range(classes or max(labels, default=-1) + 1)))
