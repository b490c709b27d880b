"""Classes: written labels turned into indices, the classes of a data set matched with those of a model, and ImageNet's.

ImageNet's classes have a wnid each (`n01440764`), and an order in the heads of published models.
"""

import csv
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed, one_line
from swin_quant.base.files import read_lines
from swin_quant.base.progress import log
from swin_quant.data.pictures import Pictures, printable

Keys = Callable[[str], Collection[str]]

SHOWN = 4  # names of a list, in a message
_MOST = 0.9  # share of ImageNet's English names that must match: older and newer lists differ a little
CLASSES_FILE = "classes.txt"
MAX_CLASSES = 1_000_000  # if the model's number of classes is unknown
ILSVRC_CLASSES = 1000
_SYNSETS = {  # number of classes -> the end of the name of timm's list
    1000: "_synsets",
    11221: "21k_miil_synsets",
    11821: "12k_synsets",
    21841: "22k_synsets",
    21842: "22k_ms_synsets",
    21843: "21k_goog_synsets",
}


def fit(pictures: Pictures, classes: int, names: Sequence[str], place: str, whose: str = "the model") -> None:
    """Give `pictures` the labels of a model with `classes` classes, called `names` if they are known.

    The pictures may have only some of the model's classes. `whose`: the owner of `names`, for errors.

    Raises:
        SwinQuantError: classes that only one of the two lists has; without names, another number of classes.
    """
    data = list(pictures.class_names)
    known = names if len(names) == classes else _imagenet(data, classes)
    found = _matches(known, data) if known else []
    if known and None not in found and len(set(found)) == len(found):
        if len(found) < len(known):
            log.info("%s: %d of the model's %d classes", place, len(found), len(known))
        elif found != list(range(len(known))):
            log.info("%s: classes are in another order than the model's: matched by name", place)
        numbers = [number for number in found if number is not None]
        pictures.labels = [numbers[label] if label >= 0 else label for label in pictures.labels]
        pictures.class_names = list(known)
    elif known and not (is_numbers(known) or is_numbers(data)):
        alone = [name for name, number in zip(data, found, strict=True) if number is None or found.count(number) > 1]
        rest = [name for number, name in enumerate(known) if number not in found]
        raise SwinQuantError(
            f"{place} has other classes than {whose}: {_shown(alone)} there alone, {_shown(rest) or 'none'} in {whose} "
            "alone: give both the same names"
        )
    elif len(data) != classes:
        held = f"{len(data)} class{'es' if len(data) > 1 else ''}"
        raise SwinQuantError(
            f"{place} has {held}, but MODEL.NUM_CLASSES is {classes}: correct one of them, or `train` the model with "
            "‹replace_head›"
        )
    elif known and is_numbers(known) != is_numbers(data):
        numbered = whose if is_numbers(known) else "the data"
        pair = f"{one_line(data[0])[:40]} is taken for {one_line(known[0])[:40]} of {whose}"
        log.warning("%s: classes are matched by position, since the names of %s are numbers: %s", place, numbered, pair)


def stated(names: Sequence[str], classes: int) -> list[str]:
    """The class names that a data set gives a model without its own; none if they are not `classes` many, or numbers
    from 0 where there is an ImageNet with so many classes, whose names are more likely."""
    known = _imagenet(names, classes) or list(names)
    is_nameless = known == list(map(str, range(classes))) and list_wnids(classes) is not None
    return known if len(known) == classes and not is_nameless else []


def in_order(names: Sequence[str]) -> list[str]:
    """Names of folders in the order of their labels: as numbers if they count from 0 or 1, else as text."""
    by_number = sorted(names, key=lambda name: (int(name) if _is_number(name) else 0, name))
    return by_number if is_numbers(by_number) else sorted(names)


def is_usual_imagenet(names: Sequence[str]) -> bool:
    """Whether names are ImageNet's, by wnid or in English, in the order of published heads; some may be unknown."""
    standard = list_wnids(len(names))
    found = _matches(standard, names) if standard else []
    in_place = all(number in (None, place) for place, number in enumerate(found))
    return in_place and len(found) - found.count(None) > _MOST * len(names)


def is_numbers(names: Sequence[str]) -> bool:
    """Whether names only count the classes, from 0 or 1."""
    if not names or not all(map(_is_number, names)):
        return False
    first = int(names[0])
    return first in (0, 1) and [int(name) for name in names] == list(range(first, first + len(names)))


def _is_number(name: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", name) is not None


def _imagenet(data: Sequence[str], classes: int) -> list[str]:
    """The wnids of an ImageNet model without names, if the data's classes are wnids of it."""
    known = list_wnids(classes) if data and all(map(is_wnid, data)) else None
    return list(known) if known and (len(data) < classes or set(data) <= set(known)) else []


def _matches(model: Sequence[str], data: Sequence[str]) -> list[int | None]:
    """The index in `model` of each name in `data`; None if there is none, or several.

    Names match as written; then in any case, with `_` as a space; then, if only one side has ImageNet's wnids, by the
    whole English name, or by one of its synonyms.
    """
    levels: list[Keys] = [lambda name: [name], lambda name: [_folded(name)]]
    if any(map(is_wnid, model)) != any(map(is_wnid, data)):
        levels += [lambda name: [_folded(get_english_names(name))]]
        levels += [lambda name: list(map(_folded, get_english_names(name).split(",")))]
    standard = list_wnids(len(model)) if len(levels) > 2 else None
    indices = [defaultdict[str, list[int]](list) for _ in levels]
    for keys, index in zip(levels, indices, strict=True):
        for place, name in enumerate(model):
            for key in keys(name):
                index[key].append(place)
    found: list[int | None] = []
    for name in data:
        hits: set[int] = set()
        for keys, index in zip(levels, indices, strict=True):
            hits = hits or {place for key in keys(name) for place in index.get(key, ())}
        if len(hits) > 1 and standard:  # two of ImageNet's classes are called crane
            hits = {place for place in hits if standard[place] == name}
        found.append(hits.pop() if len(hits) == 1 else None)
    return found


def _folded(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())


def _shown(names: Sequence[str]) -> str:
    return listed([one_line(name)[:40] for name in names], SHOWN)


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
        limit = classes or (len(names) if names else MAX_CLASSES)
        labels = [-1 if label is None else int(label) for label in written]
        for place, number in enumerate(labels):
            if written[place] is not None and not 0 <= number < limit:
                why = f" (MODEL.NUM_CLASSES is {classes})" if classes else ""
                raise SwinQuantError(f"{where(place)}: label {number} is outside 0 to {limit - 1}{why}")
        return labels, names or list(map(str, range(classes or max(labels, default=-1) + 1)))
    names = names or sorted(set(known))
    index = {name: number for number, name in enumerate(names)}
    for place, label in enumerate(written):
        if label is not None and label not in index:
            raise SwinQuantError(f"{where(place)}: {printable(label)[:80]!r} is not a class of {path.name}")
    return [-1 if label is None else index[label] for label in written], list(map(printable, names))


def is_wnid(name: str) -> bool:
    """Whether a name has the form of a wnid: n and eight digits."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


@lru_cache(maxsize=2)
def list_wnids(classes: int) -> tuple[str, ...] | None:
    """The wnids of ImageNet-1k (1000 classes), -22k, ... in the order of published heads, from timm's lists; None for
    another number. ImageNet-1k's are sorted."""
    return tuple(_read_timm(_SYNSETS[classes])) if classes in _SYNSETS else None


def get_english_names(name: str) -> str:
    """ImageNet's English names for a wnid, separated by commas; any other name unchanged."""
    return _english().get(name, name) if is_wnid(name) else name


@lru_cache(maxsize=1)
def _english() -> dict[str, str]:
    return dict(csv.reader(_read_timm("_synset_to_lemma"), delimiter="\t"))


def _read_timm(which: str) -> list[str]:
    """The lines of a list that timm carries, read as a file: importing timm takes 2 s."""
    folders = module.submodule_search_locations if (module := find_spec("timm")) else None
    return Path((folders or [""])[0], "data", "_info", f"imagenet{which}.txt").read_text("utf-8").splitlines()
