"""Pictures to logits, for commands that look at the logits themselves: run, verify, predict."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.engines.carry import Answer, carry, readable
from swin_quant.engines.engine import Engine
from swin_quant.quant.outputs import Output, rows


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
    loaded = readable(pictures, preprocess, batches, limit, workers, f"running {', '.join(engines)}")
    names: list[str] = []
    labels: list[Tensor] = []
    outputs: dict[str, list[Output]] = {key: [] for key in engines}
    for batch, answers in carry(engines, loaded, device):
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
