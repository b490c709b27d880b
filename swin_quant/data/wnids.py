"""A place with only folders named by wnid: labels are indices into ImageNet's whole list."""

from pathlib import Path

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.class_names import ILSVRC_CLASSES, fit, wnids_of
from swin_quant.data.folder import FolderPictures
from swin_quant.data.source import DataRequest, DataSource, subfolders


def _open(files: list[Path], request: DataRequest) -> FolderPictures:
    pictures, classes = FolderPictures(files[0], root=Path(request.place)), request.classes or ILSVRC_CLASSES
    known = wnids_of(classes)
    if known is None:
        raise SwinQuantError(f"{files[0]}: there is no ImageNet of {classes} classes")
    fit(pictures, classes, known, str(files[0]))
    return pictures


SOURCE = DataSource(
    "wnids",
    "folders named by wnid (n01440764, ...)",
    lambda request: [request.folder] if request.prefix and subfolders(request.folder) else [],
    _open,
)
