"""A part of ImageNet in folders named by wnid: labels are those of the whole, though not all classes are there."""

from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.progress import log
from swin_quant.data.folder import FolderPictures
from swin_quant.data.imagenet import ILSVRC_CLASSES, is_wnid, wnids_of
from swin_quant.data.source import DataSource, Wanted, subfolders


class WnidPictures(FolderPictures):
    """The pictures of `<folder>/<wnid>/**`; the label is the wnid's place among the `classes` of ImageNet.

    SwinQuantError for a folder that is none of them.
    """

    def __init__(self, folder: Path, classes: int = ILSVRC_CLASSES, root: Path | None = None) -> None:
        super().__init__(folder, root=root)
        known = wnids_of(classes)
        if known is None:
            raise SwinQuantError(f"{folder}: there is no ImageNet of {classes} classes")
        index = {wnid: number for number, wnid in enumerate(known)}
        if strange := [name for name in self.class_names if name not in index]:
            raise SwinQuantError(f"{folder}: {listed(strange)}: not among the {classes} classes of ImageNet")
        if len(self.class_names) < classes:
            log.info("%s: %d of ImageNet's %d classes", folder, len(self.class_names), classes)
        self.labels = [index[self.class_names[label]] for label in self.labels]
        self.class_names = list(known)


def _find(asked: Wanted) -> list[Path]:
    found = subfolders(asked.folder)
    if asked.prefix:
        return [asked.folder] if found else []
    fits = asked.classes is not None and 0 < len(found) < asked.classes and all(map(is_wnid, found))
    return [asked.folder] if fits and wnids_of(asked.classes or 0) else []


SOURCE = DataSource(
    "wnids",
    "folders named by wnid (n01440764, ...)",
    _find,
    lambda files, asked: WnidPictures(files[0], asked.classes or ILSVRC_CLASSES, Path(asked.place)),
)
