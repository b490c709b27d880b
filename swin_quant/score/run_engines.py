"""The one loop that runs pictures through engines: scoring, verifying and predicting read its outputs."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import track
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess, Transform
from swin_quant.data.sampling import chunks
from swin_quant.quant.outputs import Output, rows
from swin_quant.score.engine import Engine, Run

CPU = torch.device("cpu")


class EngineOutput(NamedTuple):
    """An engine's logits for a batch, float32 [B, classes] on its device, and the wall time of the forward pass.

    `output` is the unchanged output; `logits` are its `rows`, also for embeddings and maps.
    """

    logits: Tensor
    seconds: float
    output: Output


def run_engines(
    engines: Mapping[str, Run], batches: Iterable[Batch], device: torch.device, collective: bool = False
) -> Iterator[tuple[Batch, dict[str, EngineOutput]]]:
    """Yield every batch that has pictures, with the outputs of all engines for it.

    `collective`: ranks wait for each other in a forward pass, so a batch without pictures is run as well.
    Raises SwinQuantError for logits that are NaN or infinite, naming the engine.
    """
    with torch.inference_mode():
        for batch in batches:
            images = batch.images.to(device)
            if len(images):
                yield batch, {name: _run(name, engine, images) for name, engine in engines.items()}
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
    """The readable pictures of each list of indices. SwinQuantError if too many are unreadable."""
    return limit.watched(track(load_batches(pictures, transform, batches, workers), title, len(batches), "batches"))


@dataclass(frozen=True)
class Inferred:
    """The outputs of each engine for N readable pictures, batch by batch; their names, and labels int64 [N]."""

    names: list[str]
    labels: Tensor
    outputs: dict[str, list[Output]]
    unreadable: list[str]

    @property
    def logits(self) -> dict[str, Tensor]:
        """float32 [N, classes] of each engine; for other outputs their `rows`, if all have one size."""
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
    device: torch.device = CPU,
) -> Inferred:
    """Run every engine on the same pictures, all of them or `count` spread evenly, and keep the outputs.

    Raises SwinQuantError if a larger share than `max_unreadable`, or every picture, cannot be read, and for logits
    that are not finite or not [B, classes], naming the engine; `classes` None accepts any output.
    """
    batch_size = batch_size if preprocess.is_square else 1
    chosen = evenly(len(pictures), count)
    limit = UnreadableLimit(len(chosen), max_unreadable)
    batches = chunks(chosen, min([batch_size, *(engine.max_batch for engine in engines.values() if engine.max_batch)]))
    workers = default_workers(workers, 1, len(chosen))
    loaded = readable_batches(pictures, preprocess, batches, limit, workers, f"running {listed(engines, 2)}")
    found = infer_batches(engines, loaded, classes, device, lambda batch: [pictures.names[i] for i in batch.indices])
    return replace(found, unreadable=limit.names)


def infer_batches(
    engines: Mapping[str, Run],
    batches: Iterable[Batch],
    classes: int | None,
    device: torch.device = CPU,
    named: Callable[[Batch], list[str]] | None = None,
) -> Inferred:
    """`infer` on batches; `named` gives the names of their pictures, None: a hash of their values. UsageError for no
    batch."""
    names: list[str] = []
    labels: list[Tensor] = []
    outputs: dict[str, list[Output]] = {key: [] for key in engines}
    for batch, found in run_engines(engines, batches, device):
        hashes = (hashlib.sha256(image.numpy(force=True).tobytes()).hexdigest() for image in batch.images)
        names += named(batch) if named else hashes
        labels.append(batch.labels)
        for key, one in found.items():
            if classes is None and not isinstance(one.output, Tensor):
                outputs[key].append([part.float().cpu() for part in one.output])
                continue
            shape, expected = list(one.logits.shape), [len(batch.indices), classes or one.logits.shape[-1]]
            if shape != expected:
                raise SwinQuantError(f"{key}: logits are {shape}, not [{expected[0]}, {classes}]: another model's")
            outputs[key].append(one.logits.cpu())
    if not labels:
        raise UsageError("pictures: there is no batch")
    return Inferred(names, torch.cat(labels), outputs, [])


def evenly(total: int, count: int | None) -> list[int]:
    """`count` indices below `total`, as far apart as they can be, so that sorted classes all occur."""
    if count is None or count >= total:
        return list(range(total))
    return [index * total // count for index in range(count)]


def _run(name: str, engine: Run, images: Tensor) -> EngineOutput:
    def now() -> float:
        if images.is_cuda:
            torch.cuda.synchronize(images.device)
        return time.perf_counter()

    start = now()
    output = engine(images)
    seconds = now() - start
    logits = rows(output).float()
    if not logits.isfinite().all():
        raise SwinQuantError(f"engine {name}: logits hold NaN or infinity for {len(images)} pictures")
    return EngineOutput(logits, seconds, output)
