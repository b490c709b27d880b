"""Accuracy and agreement of anything that maps pictures to logits, all engines on the same pictures in one pass.

The first engine is the baseline that the others are compared with. Sums are kept per rank and added once at the end,
so that ranks with unequal shares never wait for each other, and every picture counts exactly once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.distributed import all_sum
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import log
from swin_quant.data.loader import Batch
from swin_quant.score.engine import Run
from swin_quant.score.run_engines import Answer, run_engines

_WARM_UP_BATCHES = 1


@dataclass
class Sums:
    """What one engine adds up over pictures; `gained` and `lost` are top-1 answers against the baseline."""

    pictures: int = 0
    correct1: int = 0
    correct5: int = 0
    loss: float = 0.0
    agree: int = 0
    gained: int = 0
    lost: int = 0
    signal: float = 0.0
    noise: float = 0.0
    seconds: float = 0.0
    timed: int = 0

    def add(self, logits: Tensor, labels: Tensor, baseline: Tensor) -> None:
        """logits, baseline: float32 [B, classes]; labels: int64 [B]."""
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right, right_before = best[:, 0] == labels, baseline.argmax(1) == labels
        self.pictures += len(labels)
        self.correct1 += int(right.sum())
        self.correct5 += int((best == labels[:, None]).any(1).sum())
        self.loss += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        self.agree += int((best[:, 0] == baseline.argmax(1)).sum())
        self.gained += int((right & ~right_before).sum())
        self.lost += int((right_before & ~right).sum())
        self.signal += baseline.double().square().sum().item()
        self.noise += (logits.double() - baseline.double()).square().sum().item()


@dataclass(frozen=True)
class Score:
    """Accuracy and agreement in percent, loss in nats, SQNR in dB (None if equal), deltas in points to the baseline.

    `delta_acc1_se` is the paired standard error: pictures that both engines get right or wrong add nothing to it.
    """

    pictures: int
    acc1: float
    acc5: float
    loss: float
    agreement: float
    sqnr_db: float | None
    delta_acc1: float
    delta_acc1_se: float
    ms_per_picture: float | None


Watcher = Callable[[Batch, Mapping[str, Answer]], None]
"""Told of every batch that has pictures, and of all engines' answers to it."""


def evaluate(
    engines: Mapping[str, Run], batches: Iterable[Batch], device: torch.device, collective: bool = False
) -> dict[str, Score]:
    """Score `engines` on this rank's batches; the result is of all ranks. `collective` as in `run_engines`.

    ms_per_picture is wall time of the forward passes, after a first batch of warm-up where there are more.
    Raises SwinQuantError for logits that are NaN or infinite, naming the engine, and if no picture was seen.
    """
    sums = tally(engines, batches, device, collective)
    rows = torch.tensor([list(vars(one).values()) for one in sums.values()], dtype=torch.float64)
    return scores_of(engines, all_sum(rows, device).tolist())


def tally(
    engines: Mapping[str, Run],
    batches: Iterable[Batch],
    device: torch.device,
    collective: bool = False,
    watch: Watcher | None = None,
) -> dict[str, Sums]:
    """What each engine adds up over this rank's batches."""
    sums = {name: Sums() for name in engines}
    for number, (batch, answers) in enumerate(run_engines(engines, batches, device, collective)):
        labels, baseline = batch.labels.to(device), next(iter(answers.values())).logits
        for name, answer in answers.items():
            if number >= _WARM_UP_BATCHES:
                sums[name].seconds += answer.seconds
                sums[name].timed += len(labels)
            sums[name].add(answer.logits, labels, baseline)
        if watch:
            watch(batch, answers)
    return sums


def scores_of(engines: Iterable[str], totals: Iterable[Sequence[float]]) -> dict[str, Score]:
    """Scores from the fields of each engine's `Sums`, of all pictures. SwinQuantError where those are none."""
    return {name: _score(name, Sums(*row)) for name, row in zip(engines, totals, strict=True)}  # type: ignore[arg-type]


def _score(name: str, total: Sums) -> Score:
    n = total.pictures
    if n == 0:
        raise SwinQuantError(f"engine {name} was given no picture to score: the data set is empty or unreadable")
    mean = (total.gained - total.lost) / n
    variance = (total.gained + total.lost) / n - mean**2
    return Score(
        pictures=int(n),
        acc1=100 * total.correct1 / n,
        acc5=100 * total.correct5 / n,
        loss=total.loss / n,
        agreement=100 * total.agree / n,
        sqnr_db=10 * math.log10(total.signal / total.noise) if total.noise and total.signal else None,
        delta_acc1=100 * mean,
        delta_acc1_se=100 * math.sqrt(max(variance, 0.0) / n),
        ms_per_picture=1000 * total.seconds / total.timed if total.timed else None,
    )


_NOT_TOLD = 0.01  # of guesses, at least so large a share is as good
_SURE = 1e-4  # of middling models, at most so large a share is as bad


def is_guessing(right: int, pictures: int, classes: int) -> bool:
    """Whether so many answers of `pictures` being right is no better than guessing among `classes`, in pictures enough
    that a model halfway between guessing and perfection would hardly ever do as badly (binomial tests)."""
    chance = 1 / classes
    return 1 - _at_most(right - 1, pictures, chance) > _NOT_TOLD and _at_most(right, pictures, (1 + chance) / 2) < _SURE


def warn_of_guessing(acc1: float, pictures: int, classes: int) -> None:
    """Say so of a float model whose top-1 accuracy is `acc1` percent, and what the causes usually are."""
    right = round(acc1 * pictures / 100)
    if classes > 1 and is_guessing(right, pictures, classes):
        log.warning(
            "float32 is right about %d of %d pictures: guessing among %d classes does as well. Usual causes: the data "
            "number the classes in another order than the model (docs/data.md, Class names); pictures are prepared "
            "otherwise than in its training (DATA.MEAN, DATA.STD, TEST.CROP); the head is a new one",
            right, pictures, classes,
        )  # fmt: skip


def _at_most(right: int, pictures: int, chance: float) -> float:
    """The binomial distribution: how probable so many or fewer are."""
    more = pictures + 1
    return math.fsum(
        math.exp(
            math.lgamma(more) - math.lgamma(n + 1) - math.lgamma(more - n)
            + n * math.log(chance) + (pictures - n) * math.log1p(-chance)
        )
        for n in range(right + 1)
    )  # fmt: skip
