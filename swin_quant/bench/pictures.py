"""Real pictures for a bench, prepared as the run card says."""

from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.progress import log
from swin_quant.bench.measure import BenchPictures
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import open_pictures


def load(file: str, data_path: str, split: str, zip_mode: bool, count: int) -> BenchPictures:
    """`count` pictures of a data set, evenly spread over it, prepared as the card of `file` says."""
    preprocess = Preprocess.from_dict(RunCard.read(card_path(file)).preprocess)
    source = open_pictures(data_path, split, zip_mode=zip_mode, cache_mode="no")
    count = min(count, len(source))
    chosen = [index * len(source) // count for index in range(count)]
    batch = next(load_batches(source, preprocess, [chosen]))
    if not batch.indices:
        raise SwinQuantError(f"{data_path}: none of {count} pictures can be read: {listed(batch.unreadable)}")
    if batch.unreadable:
        log.warning("left out, unreadable: %s", listed(batch.unreadable))
    return BenchPictures(batch.images, batch.labels, f"{len(batch.indices)} pictures of {Path(data_path).name}/{split}")
