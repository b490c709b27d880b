"""Pictures for the Python functions: a place on disk, or any iterable of tensors, such as a DataLoader."""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.arguments import Parameter
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, is_offered
from swin_quant.base.files import near
from swin_quant.base.progress import track
from swin_quant.config.load import check_channels
from swin_quant.config.outputs import count_classes
from swin_quant.data.archives import ZipPictures
from swin_quant.data.folder import NamedPictures
from swin_quant.data.loader import Batch, UnreadableLimit
from swin_quant.data.pictures import Pictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.sampling import sample, shard
from swin_quant.data.sources import is_archive, is_data_set, open_pictures, place_has

_USUAL: dict[str, Any] = {"seed": 0, "workers": 8, "max_unreadable": 0.01, "zip_mode": False, "cache_mode": "no"}


@dataclass(frozen=True)
class PictureSet:
    """Pictures on disk, read when they are needed: a split of a data set, or named files.

    Without a `split`, `calibrate`, `sensitivity` and `search` take a data set's training pictures, and `evaluate` takes
    "val"; any other task takes the whole folder, or "val" if the path is no folder. Without a `count`, `calibrate`
    takes 80 pictures, `verify` and `sensitivity` 64, `search` 1,024, `report` 256, `align` 4, any other task all. A
    smaller count is drawn by `seed`, the same everywhere; `verify`, `report` and `align` spread theirs evenly.

    Args:
        path: folder with train/ and val/, or digits, csv:FILE, ... (docs/data.md)
        split: train, val, ... (default: what suits the task)
        count: how many pictures, drawn by the seed
        seed: seed of the sample (default 0)
        upright: turn pictures by their EXIF tag (default: the model's way)
        batch: pictures at a time, in each process
        workers: most processes that load pictures (default 8)
        max_unreadable: share that may be unreadable (default 0.01)
        zip_mode: read train.zip and val.zip, not folders beside them
        cache_mode: zips: hold nothing, a part or all in memory
        images: pictures: files, folders, 'patterns'; instead of a data set
        classes: the model's: labels of an archive are checked against them even where none are needed
    """

    path: Annotated[str, Parameter(name="--data-path")] = ""
    split: str | None = None
    count: Annotated[int | None, Parameter(name="--pictures")] = None
    seed: int | None = None
    upright: bool | None = None
    batch: int | None = None
    workers: int | None = None
    max_unreadable: float | None = None
    zip_mode: Annotated[bool | None, Parameter(name="--zip")] = None
    cache_mode: Literal["no", "full", "part"] | None = None
    images: tuple[str, ...] = ()
    classes: Annotated[int | None, Parameter(parse=False)] = None

    def __post_init__(self) -> None:
        for name in ("count", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"‹{name}› {value}: must be at least 1")
        UnreadableLimit(0, self.max_unreadable)  # refused before a picture is read

    def __repr__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return f"PictureSet({', '.join(f'{name}={one!r}' for name, one in given.items() if one not in (None, '', ()))})"

    @classmethod
    def from_config(cls, cfg: CfgNode, split: str | None = None, **how: Any) -> "PictureSet":
        """A split of the config's data path, with the config's values for each field that `how` leaves out.

        UsageError for a model that does not take three colours.
        """
        check_channels(cfg)
        data = cfg.DATA
        given = {"zip_mode": data.ZIP_MODE, "cache_mode": data.CACHE_MODE, "workers": data.NUM_WORKERS}
        given |= {"batch": data.BATCH_SIZE, "count": data.SCORED or None, "seed": cfg.SEED}
        return cls(data.DATA_PATH, split, **({"classes": count_classes(cfg)} | given | how)).settled()

    def settled(self, cfg: CfgNode | None = None) -> "PictureSet":
        """This set with a value for each field that was left open: the config's, else the usual one."""
        if cfg is not None:
            given = {one.name: getattr(self, one.name) for one in fields(self)}
            given = {name: value for name, value in given.items() if value not in (None, "", ())}
            path = given.pop("path", cfg.DATA.DATA_PATH)
            found = replace(self.from_config(cfg), path=path, **given)
            return replace(found, count=self.count)
        missing = {name: value for name, value in _USUAL.items() if getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    def config_keys(self) -> dict[str, Any]:
        """The config's keys that this set decides, for training, which reads its pictures by a config."""
        keys = {
            "DATA.DATA_PATH": self.path or None,
            "DATA.ZIP_MODE": self.zip_mode,
            "DATA.CACHE_MODE": self.cache_mode,
            "DATA.BATCH_SIZE": self.batch,
            "DATA.NUM_WORKERS": self.workers,
            "DATA.UPRIGHT": self.upright,
            "SEED": self.seed,
        }
        return {key: value for key, value in keys.items() if value is not None}

    def with_default_split(self, unless_said: str) -> "PictureSet":
        """This set with a split, if it has none and its path is a data set, or a folder that holds the split."""
        if self.split is not None or self.images:
            return self
        is_there = is_archive(self.path, unless_said) or Path(self.path, unless_said).is_dir()
        return replace(self, split=unless_said) if is_there or is_data_set(self.path) else self

    def open(self, classes: int | None = None, class_names: Sequence[str] = (), world: World = World()) -> Pictures:
        """The opened pictures. With `classes` they have labels, checked against that number, or matched with
        `class_names` if these are known. Raises as `open_pictures` does."""
        if self.images:
            if self.path:
                raise UsageError("‹data_path› and ‹images› both name the pictures: give one of them")
            return NamedPictures(list(self.images))
        if not self.path:
            either = " or ‹images› PLACE ..." if is_offered("images") else ""
            raise UsageError(f"no pictures: give ‹data_path› DIR{either}")
        if self.split is None and not is_data_set(self.path):
            if not os.path.exists(self.path) and not glob.has_magic(self.path):
                remedy = near(self.path) or ": ‹data_path› takes a folder of pictures"
                raise SwinQuantError(f"{self.path}: no such file or folder{remedy}")
            if classes is not None:
                raise UsageError(f"{self.path}: pictures without a split have no labels: pictures(path, split)")
            opened: Pictures = NamedPictures([self.path])
        else:
            split = self.split or "val"
            if classes is None and (self.zip_mode or is_archive(self.path, split)):
                classes = self.classes
            opened = open_pictures(
                self.path, split, zip_mode=bool(self.zip_mode), num_classes=classes, class_names=class_names
            )
            if isinstance(opened, ZipPictures):
                every = range(len(opened))
                shares = {"no": every[:0], "part": shard(every, world.rank, world.size), "full": every}
                share = shares[self.cache_mode or "no"]
                opened.hold(track(share, f"reading {split}", len(share), "pictures"))
        opened.upright = self.upright
        return opened

    def require(self) -> None:
        """Raise as `open` does where the split is not there; a folder of the split is not looked through."""
        if not place_has(self.path, self.split or "val", bool(self.zip_mode)):
            replace(self, cache_mode="no").open()

    def has(self, count: int) -> bool:
        """Whether there are as many pictures, in val if no split is named."""
        there = len(replace(self.with_default_split("val"), cache_mode="no").open())
        return min(there, self.count or there) >= count

    def indices(self, pictures: Pictures) -> list[int]:
        """The indices of this set in the opened pictures."""
        return list(range(len(pictures))) if self.count is None else sample(len(pictures), self.count, self.seed or 0)


Source: TypeAlias = PictureSet | str | Path | Iterable[Any]
"""A PictureSet, the place of one, or batches: images, (images, labels) or a mapping with `images` or `pixel_values`.
Images are float tensors [B, 3, H, W], preprocessed, or pictures, as `Prepared` takes them."""


def pictures(
    path: str | Path,
    split: str | None = None,
    count: int | None = None,
    seed: int | None = None,
    upright: bool | None = None,
    max_unreadable: float | None = None,
) -> PictureSet:
    """Pictures at `path`: class folders under `<path>/<split>`, `<split>.zip` with its map, the word "digits", or
    another kind of data set, recognised or named by its prefix: `csv:my.csv`, `wds:shards-{0..9}.tar` (docs/data.md).

    Without a split, `path` may also be a picture, a folder of pictures or a pattern, and there are no labels; each task
    takes the split of a data set that suits it. `count` pictures are drawn by `seed` (spread evenly by `verify` and
    `align`); None: as many as a task takes. `upright`: whether to turn pictures as their EXIF says; None: as the
    model's preprocessing says, which is the only rule in deployment. `max_unreadable`: the share of them that may be
    damaged (default 0.01). Nothing is read yet.
    """
    return PictureSet(str(path), split, count, seed, upright, max_unreadable=max_unreadable)


def asked_for(given: Source | None) -> PictureSet | Iterable[Any]:
    """The pictures that a verb was given: a set, with what was left open, or batches. UsageError for neither."""
    if given is None:
        return PictureSet()
    if isinstance(given, str | Path):
        return pictures(given)
    if isinstance(given, PictureSet) or (isinstance(given, Iterable) and not isinstance(given, Tensor | Mapping)):
        return given
    raise UsageError(
        f"pictures are {type(given).__name__}: give a folder, sq.pictures(FOLDER, SPLIT) or an iterable of batches, of "
        "one alone [batch]"
    )


def resolve_source(given: Source | None, cfg: CfgNode | None = None) -> PictureSet | Iterable[Any]:
    """`asked_for`, with all fields of a set: the DATA of the model's config fills in what was left open."""
    asked = asked_for(given)
    return asked.settled(cfg) if isinstance(asked, PictureSet) else asked


def batches(source: Iterable[Any], labelled: bool, prepared: Prepared, classes: int | None = None) -> Iterator[Batch]:
    """Convert a user's batches to `Batch`. UsageError for an item that is no batch, and where labels are needed for
    labels that are missing, text, or outside 0 to `classes` - 1."""
    start = 0
    for item in source:
        images, labels = _parts(item, prepared.inputs.names if prepared.inputs else ())
        try:
            images = prepared(images)
        except UsageError as error:
            raise UsageError(f"pictures: a batch is images, (images, labels) or a mapping: {error}") from error
        if labels is None and labelled:
            raise UsageError("pictures: accuracy needs labels: give batches of (images, labels)")
        labels = torch.full((len(images),), -1) if labels is None else _numbers(labels, labelled)
        if labels.shape != images.shape[:1]:
            raise UsageError(f"pictures: {len(images)} images, but labels are {list(labels.shape)}")
        if labelled and len(labels) and not 0 <= labels.min() <= labels.max() < (classes or labels.max() + 1):
            said = f"the model has {classes} classes, 0 to {classes - 1}" if classes else "they count from 0"
            raise UsageError(f"pictures: labels are from {labels.min()} to {labels.max()}, but {said}")
        yield Batch(images, labels, list(range(start, start + len(images))), [])
        start += len(images)


def _numbers(labels: Any, labelled: bool) -> Tensor:
    """Labels as int64 [B]. UsageError for names, and for fractions where labels are needed."""
    try:
        given = torch.as_tensor(labels).cpu()
        numbers = given.long()
    except (TypeError, ValueError, RuntimeError) as error:
        one = labels[0] if isinstance(labels, Sequence) and labels and not isinstance(labels, str) else labels
        raise UsageError(
            f"pictures: labels are {type(one).__name__} ({one!r:.40}): give numbers, as model.class_names.index(NAME)"
        ) from error
    if labelled and (is_odd := given != numbers).any():
        raise UsageError(f"pictures: labels hold {given[is_odd][0]:g}: give whole numbers, one class for each picture")
    return numbers


def _parts(item: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Inputs and labels of a batch; `names`: of several inputs, which a mapping then holds."""
    if isinstance(item, Mapping) and names:
        key = next((key for key in ("labels", "label") if key in item and key not in names), None)
        return {name: one for name, one in item.items() if name != key}, item.get(key)
    if isinstance(item, Mapping):
        images = item.get("images", item.get("pixel_values"))
        return images, item.get("labels", item.get("label"))
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    return (item[0], None) if isinstance(item, (tuple, list)) and len(item) == 1 else (item, None)
