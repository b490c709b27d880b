"""From a data path and a split to pictures: the one place that knows every kind of source."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.data.digits import DigitsPictures
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import Pictures, is_picture
from swin_quant.data.zip import ZipPictures

DIGITS = "digits"


def open_pictures(
    data_path: str,
    split: str,
    *,
    zip_mode: bool = False,
    cache_mode: str = "part",
    num_classes: int | None = None,
    rank: int = 0,
    world: int = 1,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Pictures:
    """Open one split of `data_path`: class folders, with `zip_mode` an archive and its map, or the digits.

    Args:
        data_path: `‹data_path›/<split>/<class>/*`, `‹data_path›/<split>.zip` and `<split>_map.txt`, or "digits".
        num_classes: the classes of the model. None: labels are not needed, so nothing about them is checked, and
            the pictures may lie flat in `‹data_path›/<split>` or `‹data_path›`.
        cache_mode, rank, world, track: see ZipPictures.

    Raises:
        UsageError: no data path, or the wrong one of ‹zip› and no ‹zip›.
        SwinQuantError: data that are missing, empty, damaged, or of another number of classes.
    """
    if not data_path:
        raise UsageError("no data path: set ‹data_path› to a folder of pictures, or to 'digits'")
    labelled = num_classes is not None
    if data_path == DIGITS:
        pictures: Pictures = DigitsPictures(split)
    elif zip_mode:
        _find(Path(data_path), split, zip_mode, labelled)
        pictures = ZipPictures(Path(data_path), split, num_classes, cache_mode, rank, world, track)
    else:
        pictures = FolderPictures(_find(Path(data_path), split, zip_mode, labelled), labelled)
    if labelled and num_classes != len(pictures.class_names):
        raise SwinQuantError(
            f"{data_path}: {split} has {len(pictures.class_names)} classes, but MODEL.NUM_CLASSES is {num_classes}: "
            "correct one of them"
        )
    return pictures


def _find(root: Path, split: str, zip_mode: bool, labelled: bool) -> Path:
    """Return the folder or archive of the split, or the root where it may and does hold pictures itself."""
    try:
        if not root.is_dir():
            problem = "is not a folder" if root.exists() else "no such folder"
            raise SwinQuantError(f"{root}: {problem}; set ‹data_path› to the folder that holds the splits")
        folders = {item.name: item for item in root.iterdir() if item.is_dir()}
        archives = {item.stem: item for item in root.glob("*.zip")}
        flat = any(is_picture(item.name) for item in root.iterdir())
    except OSError as error:
        raise SwinQuantError(f"{root}: cannot be read: {error.strerror}") from error
    wanted, others = (archives, folders) if zip_mode else (folders, archives)
    if split in wanted:
        return wanted[split]
    if split in others:
        remedy = f"{split} is a folder: drop ‹zip›" if zip_mode else f"{split} is an archive: ‹zip› is needed"
        raise UsageError(f"{root}: {remedy}")
    if flat and not labelled and not zip_mode:
        return root
    layout = f"{split}.zip with {split}_map.txt" if zip_mode else f"folder {split}"
    held = listed([*sorted(folders), *sorted(item.name for item in archives.values())])
    raise SwinQuantError(f"{root}: has no {layout}; it holds {held or 'neither folders nor archives'}")


def has_split(cfg: CfgNode, split: str) -> bool:
    """Whether the config's data path holds `split`, in the form that DATA.ZIP_MODE says."""
    root = Path(cfg.DATA.DATA_PATH)
    return cfg.DATA.DATA_PATH == DIGITS or (root / (f"{split}.zip" if cfg.DATA.ZIP_MODE else split)).exists()
