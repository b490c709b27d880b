"""The pictures that policies are measured on, as the network takes them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.data.calibration import calibration_batches
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import sample
from swin_quant.data.sources import open_unlabelled
from swin_quant.tasks.sensitivity import Sampling


class MeasuredOn(NamedTuple):
    """Batches of images [B, channels, S, S], and names that tell these pictures from others: of all that were drawn,
    also of those that could not be read, which others of the data stand in for. `place`: the last part of their path,
    as a config that names it is kept. `others` reads as many that are none of these, as far as there
    are; None where there are none."""

    batches: list[Tensor]
    names: list[str]
    place: str = ""
    others: Callable[[], list[Tensor]] | None = None


def of_config(cfg: CfgNode, sampling: Sampling, preprocess: Preprocess) -> MeasuredOn:
    """The sample of the config's data."""
    return of_pictures(open_unlabelled(cfg, sampling.split), sampling, preprocess, cfg.DATA.NUM_WORKERS)


def drawn(cfg: CfgNode, sampling: Sampling) -> list[str]:
    """The names of that sample; no picture is read."""
    opened = open_unlabelled(cfg, sampling.split)
    return [opened.names[index] for index in _indices(opened, sampling)]


def of_pictures(opened: Pictures, sampling: Sampling, preprocess: Preprocess, workers: int = 8) -> MeasuredOn:
    """The sample of opened pictures. SwinQuantError, which names some, where too many of them cannot be read."""
    images = _read(opened, sampling, preprocess, workers)
    names = [opened.names[index] for index in _indices(opened, sampling)]
    if not (left := sample(len(opened), len(opened), sampling.seed)[sampling.count :]):
        return MeasuredOn(images, names)
    return MeasuredOn(images, names, others=partial(_read, SomePictures(opened, left), sampling, preprocess, workers))


def _read(opened: Pictures, sampling: Sampling, preprocess: Preprocess, workers: int) -> list[Tensor]:
    limit = UnreadableLimit(len(opened), sampling.max_unreadable)
    count = min(sampling.count, len(opened))
    size = sampling.batch_size if preprocess.is_square else 1
    numbered = calibration_batches(
        opened, preprocess, count, size, sampling.seed, limit, workers=default_workers(workers, 1, count)
    )
    images = [batch.images for _, batch in numbered if len(batch.labels)]
    if limit.names:
        log.warning("%d pictures are unreadable, others are taken where there are more: %s",
                    len(limit.names), listed(limit.names))  # fmt: skip
    return images


def _indices(opened: Pictures, sampling: Sampling) -> list[int]:
    return sample(len(opened), min(sampling.count, len(opened)), sampling.seed)
