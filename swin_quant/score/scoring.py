"""Accuracy and agreement on labelled pictures: sums over pictures, scores from sums, results from scores.

All engines see the same pictures in one pass; the first is the baseline of the comparisons. Each rank keeps its sums,
which are added once at the end: ranks with unequal shares never wait, and every picture counts exactly once.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.distributed import World, all_sum, gather
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import read_lines
from swin_quant.base.progress import log, track
from swin_quant.cards.records import PTQ, QAT, DatasetRecord, Result
from swin_quant.config.outputs import need_logits
from swin_quant.data.class_names import get_english_names, list_wnids
from swin_quant.data.loader import Batch
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.sampling import digest, shard
from swin_quant.score.engine import Engine, Run
from swin_quant.score.run_engines import BATCH, EngineOutput, largest_batch, read_batches, run_engines

BASELINE = "float32"
_WARM_UP_BATCHES = 1
_ROUNDS = 5  # of all engines on the only batch there is
_CHANCE = 0.01  # a guesser is right as often with at least this probability
_CERTAIN = 1e-4  # a middling model is right as rarely with at most this probability


@dataclass
class Sums:
    """The sums of one engine over pictures. `gained`: right where the baseline is wrong; `lost`: the reverse.

    `won` and `gave`: the same against PTQ, for the QAT engine that began with it.
    """

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
    won: int = 0
    gave: int = 0

    def add(self, logits: Tensor, labels: Tensor, baseline: Tensor, start: Tensor | None = None) -> None:
        """logits, baseline, start (PTQ's): float32 [B, classes]; labels: int64 [B]."""
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right, right_before = best[:, 0] == labels, baseline.argmax(1) == labels
        self.pictures += len(labels)
        self.correct1 += int(right.sum())
        self.correct5 += int((best == labels[:, None]).any(1).sum())
        self.loss += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        self.agree += int((best[:, 0] == baseline.argmax(1)).sum())
        self.gained += int((right & ~right_before).sum())
        self.lost += int((right_before & ~right).sum())
        if start is not None:
            right_before = start.argmax(1) == labels
            self.won += int((right & ~right_before).sum())
            self.gave += int((right_before & ~right).sum())
        self.signal += baseline.double().square().sum().item()
        self.noise += (logits.double() - baseline.double()).square().sum().item()


@dataclass(frozen=True)
class Score:
    """Accuracy and agreement in percent, loss in nats, SQNR in dB (None if equal), deltas to the baseline in points.

    `delta_ptq`: the delta to PTQ, for QAT. The standard errors are paired: pictures that both engines get right or
    wrong add nothing to them.
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
    delta_ptq: float = 0.0
    delta_ptq_se: float = 0.0


def evaluate(
    engines: Mapping[str, Run], batches: Iterable[Batch], device: torch.device, collective: bool = False
) -> dict[str, Score]:
    """The scores of `engines` over the batches of all ranks; `batches` are this rank's. `collective`: see run_engines.

    ms_per_picture is wall time of the forward passes of whole batches, after a first one of warm-up, which is run again
    where it is the only one: an engine of a fixed batch computes as much for a smaller one.
    Raises SwinQuantError for logits that are NaN or infinite, naming the engine, and if no picture was seen.
    """
    sums, starts = {name: Sums() for name in engines}, _starts(engines)
    whole: Batch | None = None

    def count_time(found: Mapping[str, EngineOutput]) -> None:
        for name, output in found.items():
            sums[name].seconds += output.seconds
            sums[name].timed += len(output.logits)

    for number, (batch, outputs) in enumerate(run_engines(engines, batches, device, collective)):
        if whole is None or len(batch.images) > len(whole.images):
            whole = batch
            for one in sums.values():
                one.seconds = one.timed = 0
        labels, baseline = batch.labels.to(device), next(iter(outputs.values())).logits
        for name, output in outputs.items():
            start = outputs[starts[name]].logits if name in starts else None
            sums[name].add(output.logits, labels, baseline, start)
        if number >= _WARM_UP_BATCHES and len(batch.images) == len(whole.images):
            count_time(outputs)
    if whole is not None and not any(one.timed for one in sums.values()) and not collective:
        for _, outputs in run_engines(engines, [whole] * _ROUNDS, device):
            count_time(outputs)
    rows = torch.tensor([list(vars(one).values()) for one in sums.values()], dtype=torch.float64)
    totals = all_sum(rows, device).tolist()
    return {name: _score(name, Sums(*row)) for name, row in zip(engines, totals, strict=True)}


def _starts(engines: Mapping[str, Run]) -> dict[str, str]:
    """QAT engine -> the PTQ engine of the same policy, which it began with."""
    quantized = {name: one for name, one in engines.items() if isinstance(one, Engine) and one.policy}
    begun = {one.policy_sha256: name for name, one in quantized.items() if one.weights == PTQ}
    return {
        name: begun[one.policy_sha256]
        for name, one in quantized.items()
        if one.weights == QAT and one.policy_sha256 in begun
    }


def _score(name: str, total: Sums) -> Score:
    n = total.pictures
    if n == 0:
        raise SwinQuantError(f"engine {name} was given no picture to score: the data set is empty or unreadable")

    def paired(gained: float, lost: float) -> tuple[float, float]:
        """The difference of two accuracies in points, and its standard error."""
        mean = (gained - lost) / n
        return 100 * mean, 100 * math.sqrt(max((gained + lost) / n - mean**2, 0.0) / n)

    return Score(
        int(n),
        100 * total.correct1 / n,
        100 * total.correct5 / n,
        total.loss / n,
        100 * total.agree / n,
        10 * math.log10(total.signal / total.noise) if total.noise and total.signal else None,
        *paired(total.gained, total.lost),
        1000 * total.seconds / total.timed if total.timed else None,
        *paired(total.won, total.gave),
    )


def make_results(
    engines: Mapping[str, Engine],
    scores: Mapping[str, Score],
    dataset: DatasetRecord,
    batch_size: int,
    device: torch.device,
    unreadable: Sequence[str],
) -> dict[str, Result]:
    """Scores as a run card keeps them."""
    results, starts = {}, _starts(engines)
    for key, score in scores.items():
        engine, measured = engines[key], asdict(score)
        if key not in starts:
            measured |= dict.fromkeys(("delta_ptq", "delta_ptq_se"))
        if key == BASELINE or BASELINE not in engines:
            measured |= dict.fromkeys(("agreement", "sqnr_db", "delta_acc1", "delta_acc1_se"))
        same = ("precision", "policy", "policy_sha256", "weights", "calibrator")
        results[key] = Result(
            engine=engine.name,
            dataset=dataset,
            batch_size=batch_size,
            device=device.type,
            unreadable=len(unreadable),
            note=f"unreadable: {listed(unreadable)}" if unreadable else None,
            **{field: getattr(engine, field) for field in same},
            **measured,
        )
    return results


def is_guessing(right: int, pictures: int, classes: int) -> bool:
    """Whether `right` correct answers are no better than guessing among `classes` (binomial tests).

    The pictures must be enough: a model halfway between guessing and perfection would hardly ever do as badly.
    """

    def at_most(hits: int, chance: float) -> float:
        hit_counts = torch.arange(hits + 1, dtype=torch.float64)
        binomial = torch.distributions.Binomial(pictures, torch.tensor(chance, dtype=torch.float64))
        return binomial.log_prob(hit_counts).exp().sum().item()

    is_chance = 1 - at_most(right - 1, 1 / classes) > _CHANCE
    return is_chance and at_most(right, (1 + 1 / classes) / 2) < _CERTAIN


@dataclass(frozen=True)
class Guess:
    """A class, its name (or index without one) and its probability, 0 to 1."""

    index: int
    name: str
    probability: float


def top_classes(logits: Tensor, names: Sequence[str], count: int = 5) -> list[list[Guess]]:
    """The `count` most probable classes (all, if there are fewer) of each row of logits [N, classes]; best first."""
    best = logits.double().softmax(1).topk(min(count, logits.shape[1]), dim=1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[Guess(index, names[index], share) for index, share in zip(*row, strict=True)] for row in rows]


def class_names(classes: int, labels: str | None = None, carried: Sequence[str] = ()) -> list[str]:
    """Names of the classes: from the file `labels`, one a line; else `carried` by a card or artifact, if as many; else
    ImageNet's if it has a set with this number; else numbers.

    UsageError for a file with another number of names, SwinQuantError for one that cannot be read as text.
    """
    if labels is not None:
        names = read_lines(labels, "list of class names")
        if len(names) != classes:
            raise UsageError(f"‹labels› {labels}: has {len(names)} names, the model {classes} classes")
        return names
    named = carried if len(carried) == classes else list_wnids(classes) or range(classes)
    return [get_english_names(str(name)) for name in named]


def score_engines(
    engines: Mapping[str, Engine],
    source: PictureSet | Iterable[Any],
    prepared: Prepared,
    classes: int | None,
    class_names: Sequence[str],
    world: World,
) -> dict[str, Result]:
    """A result for each engine by its key, all on the same pictures in one pass: a place on disk, or batches.

    An engine called `float32` comes first and is the baseline; without one there are no comparisons. Every rank scores
    its share of a place, and all return the same results. Labels are checked against `classes`; None where nobody says
    how many. UsageError for labels that are missing or do not fit. Warns of a float model that only guesses.
    """
    unreadable: list[str] = []
    if isinstance(source, PictureSet):
        if classes is None:
            raise UsageError("the model does not say how many classes it has: give batches of (images, labels)")
        source = source.with_default_split("val")
        pictures = source.open(classes, class_names, world)
        chosen, wanted = sorted(source.indices(pictures)), source.batch or BATCH
        batch, total, classes = largest_batch(wanted, engines), len(chosen), len(pictures.class_names)
        if batch < wanted:
            log.info("batch %d instead of %d: the limit of an engine", batch, wanted)
        share, title = shard(chosen, world.rank, world.size), f"scoring {listed(engines, 2)}"
        how = replace(source, batch=batch)
        loaded, limit = read_batches(pictures, prepared.known, share, how, title, world.size, total)
        scores = evaluate(engines, loaded, world.device)
        limit.count(gather(limit.names))
        if unreadable := sorted(limit.names):
            log.warning("%d of %d pictures are unreadable: %s", len(unreadable), total, listed(limit.names))
        identity = digest(pictures.names[index] for index in chosen)
        name, split = Path(source.path).name, source.split or ""
    else:
        sizes, images, labels = list[int](), hashlib.sha256(), hashlib.sha256()  # hashes of values identify tensors

        def scored(given: Iterable[Any]) -> Iterator[Batch]:
            count = len(given) if isinstance(given, Sized) else None
            for one in track(batches(given, True, prepared, classes), "scoring", count, "batches"):
                sizes.append(len(one.images))
                images.update(one.images.numpy(force=True).tobytes())
                labels.update(one.labels.numpy(force=True).tobytes())
                yield one

        scores = evaluate(engines, scored(source), world.device)
        batch, total, name, split = max(sizes), sum(sizes), "tensors", ""
        identity = hashlib.sha256(images.digest() + labels.digest()).hexdigest()
    if (baseline := scores.get(BASELINE)) and classes and classes > 1:
        right = round(baseline.acc1 * baseline.pictures / 100)
        if is_guessing(right, baseline.pictures, classes):
            log.warning(
                f"float32 is right about {right} of {baseline.pictures} pictures: guessing among {classes} classes "
                "does as well. Usual causes: the data number the classes in another order than the model "
                "(docs/data.md, Class names); pictures are not prepared as in the model's training (DATA.MEAN, "
                "DATA.STD, TEST.CROP); the head is new"
            )
    dataset = DatasetRecord(name=name, split=split, pictures=total, sha256=identity)
    return make_results(engines, scores, dataset, batch, world.device, unreadable)


def open_labelled(
    cfg: CfgNode,
    split: str,
    world: World,
    cache_mode: Literal["no", "full", "part"] | None = None,
    class_names: Sequence[str] = (),
) -> Pictures:
    """The labelled pictures of a split, their classes matched with the model's by name, or by number without names.

    `cache_mode` replaces DATA.CACHE_MODE; `class_names` are the model's, if they are known.
    """
    need_logits(cfg.MODEL.OUTPUT_KIND, "accuracy")
    pictures = PictureSet.from_config(cfg, split)
    pictures = replace(pictures, cache_mode=cache_mode or pictures.cache_mode)
    return pictures.open(cfg.MODEL.NUM_CLASSES, class_names, world)
