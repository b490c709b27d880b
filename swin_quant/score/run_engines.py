"""The one loop that carries pictures through engines; scoring, verifying and predicting use what comes out."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess, Transform
from swin_quant.data.sampling import chunks
from swin_quant.quant.outputs import Output, rows
from swin_quant.score.engine import Engine, Run


class Answer(NamedTuple):
    """Logits of an engine for a batch, float32 [B, classes] on its device, and the wall time that they took.

    Of other outputs `logits` are their rows; `output` is what was given.
    """

    logits: Tensor
    seconds: float
    output: Output


def run_engines(
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


def readable_batches(
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


@dataclass(frozen=True)
class Inferred:
    """What each engine gave for N readable pictures, batch by batch: their names, and labels int64 [N]."""

    names: list[str]
    labels: Tensor
    outputs: dict[str, list[Output]]
    unreadable: list[str]

    @property
    def logits(self) -> dict[str, Tensor]:
        """float32 [N, classes] of each engine; of other outputs their rows, where all have one size."""
        return {key: torch.cat([rows(part) for part in parts]) for key, parts in self.outputs.items()}


def infer(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    preprocess: Preprocess,
    classes: int | None,
    *,
    batch_size: int = 32,
    workers: int = 0,
    count: int | None = None,
    max_unreadable: float = 1.0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Inferred:
    """Run every engine on the same pictures: all of them, or `count` spread evenly over their order.

    Raises SwinQuantError when a larger share than `max_unreadable`, or every picture, cannot be read, and for logits
    that are not finite or not [B, classes], naming the engine; `classes` None: the outputs may be any.
    """
    batch_size = batch_size if preprocess.is_square else 1
    chosen = _spread(len(pictures), count)
    limit = UnreadableLimit(len(chosen), max_unreadable)
    batches = chunks(chosen, min([batch_size, *(engine.max_batch for engine in engines.values() if engine.max_batch)]))
    workers = default_workers(workers, 1, len(chosen))
    loaded = readable_batches(pictures, preprocess, batches, limit, workers, f"running {', '.join(engines)}")
    names: list[str] = []
    labels: list[Tensor] = []
    outputs: dict[str, list[Output]] = {key: [] for key in engines}
    for batch, answers in run_engines(engines, loaded, device):
        names += [pictures.names[index] for index in batch.indices]
        labels.append(batch.labels)
        for key, answer in answers.items():
            outputs[key].append(_checked(key, answer, len(batch.indices), classes))
    return Inferred(names, torch.cat(labels), outputs, limit.names)


def _spread(total: int, count: int | None) -> list[int]:
    """`count` indices below `total`, as far apart as they can be: classes that lie one after another all occur."""
    if count is None or count >= total:
        return list(range(total))
    return [index * total // count for index in range(count)]


def _checked(key: str, answer: Answer, pictures: int, classes: int | None) -> Output:
    if classes is None and not isinstance(answer.output, Tensor):
        return [part.float().cpu() for part in answer.output]
    logits = answer.logits
    if logits.shape != (pictures, classes or logits.shape[-1]):
        raise SwinQuantError(f"{key}: logits are {list(logits.shape)}, not [{pictures}, {classes}]: another model's")
    return logits.cpu()
