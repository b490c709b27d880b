"""The one loop that carries pictures through engines; scoring, verifying and predicting use what comes out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Transform
from swin_quant.quant.outputs import Output, rows

Run = Callable[[Tensor], Any]
"""Images [B, 3, H, W] -> logits [B, classes], or what else a model gives (`quant.outputs.Output`)."""


class Answer(NamedTuple):
    """Logits of an engine for a batch, float32 [B, classes] on its device, and the wall time that they took.

    Of other outputs `logits` are their rows; `output` is what was given.
    """

    logits: Tensor
    seconds: float
    output: Output


def carry(
    engines: Mapping[str, Run], batches: Iterable[Batch], device: torch.device, collective: bool = False
) -> Iterator[tuple[Batch, dict[str, Answer]]]:
    """Yield every batch that has pictures, with the answers of all engines to it.

    `collective`: the passes of the ranks wait for each other, so that a batch without a picture is one, too.
    Raises SwinQuantError for logits that are NaN or infinite, naming the engine.
    """
    with torch.inference_mode():
        for batch in batches:
            images = batch.images.to(device)
            if len(images):
                yield batch, {name: _answer(name, engine, images) for name, engine in engines.items()}
            elif collective:
                for engine in engines.values():
                    engine(images)


def readable(
    pictures: Pictures,
    transform: Transform,
    batches: Sequence[Sequence[int]],
    limit: UnreadableLimit,
    workers: int,
    title: str,
) -> Iterator[Batch]:
    """The pictures of each list of indices, those left out that cannot be read: SwinQuantError above the limit."""
    for batch in track(load_batches(pictures, transform, batches, workers), title, len(batches)):
        limit.count(batch.unreadable)
        limit.check()
        yield batch


def _answer(name: str, engine: Run, images: Tensor) -> Answer:
    start = _now(images.device)
    output = engine(images)
    seconds = _now(images.device) - start
    logits = rows(output).float()
    if not logits.isfinite().all():
        raise SwinQuantError(f"engine {name}: logits hold NaN or infinity for {len(images)} pictures")
    return Answer(logits, seconds, output)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
