"""Full batches for calibration: N batches of B readable pictures, the same ones on any number of ranks."""

from collections.abc import Iterator, Sequence

import torch

from swin_quant.data.loader import Batch, UnreadableLimit, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import sample

Numbered = tuple[int, Batch]


def calibration_batches(
    pictures: Pictures,
    transform: Transform,
    batches: int,
    batch_size: int,
    seed: int,
    limit: UnreadableLimit,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[Numbered]:
    """Yield (number, batch) for this rank's share of `batches` seeded batches of `batch_size` pictures.

    An unreadable picture is replaced by the one that lies `batches * batch_size` further in the seeded order, and
    so on: a rule for each place alone, so that ranks agree without asking each other. A batch comes out short only
    when the data hold no further picture.
    """
    wanted = batches * batch_size
    sample(len(pictures), wanted, seed)  # refuses more pictures than there are
    order = sample(len(pictures), len(pictures), seed)
    mine = list(range(rank, batches, world))
    first = [order[number * batch_size : (number + 1) * batch_size] for number in mine]
    for number, batch in zip(mine, load_batches(pictures, transform, first, workers), strict=True):
        replacements = [batch]
        for place, index in enumerate(order[number * batch_size : (number + 1) * batch_size]):
            if index not in batch.indices:
                later = order[number * batch_size + place + wanted :: wanted]
                replacements.append(_first_readable(pictures, transform, later))
        merged = _merged(replacements)
        limit.count(merged.unreadable)
        limit.check()
        yield number, merged


def _first_readable(pictures: Pictures, transform: Transform, candidates: Sequence[int]) -> Batch:
    """A batch of one picture, or of none, with the names of those that were passed over."""
    tried = [next(load_batches(pictures, transform, [[]]))]
    for index in candidates:
        tried.append(next(load_batches(pictures, transform, [[index]])))
        if len(tried[-1].labels):
            break
    return _merged(tried)


def _merged(parts: Sequence[Batch]) -> Batch:
    return Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        [index for part in parts for index in part.indices],
        [name for part in parts for name in part.unreadable],
    )
