"""Calibration batches: a number of readable pictures, the same ones on any number of ranks."""

from collections.abc import Iterator
from itertools import count

import torch

from swin_quant.base.distributed import all_sum
from swin_quant.data.loader import Batch, UnreadableLimit, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import sample

Numbered = tuple[int, Batch]


def calibration_batches(
    pictures: Pictures,
    transform: Transform,
    wanted: int,
    batch_size: int,
    seed: int,
    limit: UnreadableLimit,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[Numbered]:
    """Yield (number, batch) for this rank's share of `wanted` seeded pictures, `batch_size` at a time.

    Unreadable pictures are left out of their batch. When every rank has read its share, rank 0 replaces them by the
    next readable pictures of the seeded order, in batches of their own. So any number of ranks takes the same `wanted`
    pictures, or fewer if the data hold no more. Every rank must read all of its batches.
    """
    sample(len(pictures), wanted, seed)  # refuses more pictures than there are
    batches = -(-wanted // batch_size)
    order = sample(len(pictures), len(pictures), seed)
    mine = list(range(rank, batches, world))
    first = [order[:wanted][number * batch_size : (number + 1) * batch_size] for number in mine]
    missing = 0
    for number, batch in zip(mine, limit.watched(load_batches(pictures, transform, first, workers)), strict=True):
        missing += len(batch.unreadable)
        yield number, batch

    missing = int(all_sum(torch.tensor(missing), torch.device("cpu")))
    spare = order[wanted:] if rank == 0 else []
    for number in count(batches):
        if not missing or not spare:
            return
        size = min(missing, batch_size)
        batch, spare = next(limit.watched(load_batches(pictures, transform, [spare[:size]]))), spare[size:]
        missing -= len(batch.labels)
        yield number, batch


def seeded_order(pictures: Pictures, seed: int) -> list[str]:
    """The names of all pictures, unreadable ones too, in the order in which `calibration_batches` takes them."""
    return [pictures.names[index] for index in sample(len(pictures), len(pictures), seed)]
