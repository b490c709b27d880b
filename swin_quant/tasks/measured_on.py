"""The pictures that policies are measured on, as the network takes them."""

from typing import NamedTuple

from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.loader import default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import sample
from swin_quant.data.sources import open_pictures
from swin_quant.tasks.sensitivity import Sampling


class MeasuredOn(NamedTuple):
    """Batches of images [B, channels, S, S], and names that tell these pictures from others: of all that were drawn,
    whether or not they could be read."""

    batches: list[Tensor]
    names: list[str]


def of_config(cfg: CfgNode, sampling: Sampling, preprocess: Preprocess) -> MeasuredOn:
    """The sample of the config's data."""
    return of_pictures(_open(cfg, sampling), sampling, preprocess, cfg.DATA.DATA_PATH, cfg.DATA.NUM_WORKERS)


def drawn(cfg: CfgNode, sampling: Sampling) -> list[str]:
    """The names of that sample; no picture is read."""
    opened = _open(cfg, sampling)
    return [opened.names[index] for index in _indices(opened, sampling)]


def of_pictures(
    opened: Pictures, sampling: Sampling, preprocess: Preprocess, place: str, workers: int = 8
) -> MeasuredOn:
    """The sample of opened pictures. SwinQuantError, which names the `place`, where none of them can be read."""
    indices = _indices(opened, sampling)
    size = sampling.batch_size
    chunks = [indices[first : first + size] for first in range(0, len(indices), size)]
    loading = load_batches(opened, preprocess, chunks, default_workers(workers, 1, len(indices)))
    batches = [batch for batch in loading if len(batch.labels)]
    if not batches:
        raise SwinQuantError(f"{place}: there is no readable picture to measure with")
    return MeasuredOn([batch.images for batch in batches], [opened.names[index] for index in indices])


def _open(cfg: CfgNode, sampling: Sampling) -> Pictures:
    return open_pictures(cfg.DATA.DATA_PATH, sampling.split, zip_mode=cfg.DATA.ZIP_MODE, cache_mode="no",
                         num_classes=cfg.MODEL.NUM_CLASSES if cfg.DATA.ZIP_MODE else None)  # fmt: skip


def _indices(opened: Pictures, sampling: Sampling) -> list[int]:
    return sample(len(opened), min(sampling.count, len(opened)), sampling.seed)
