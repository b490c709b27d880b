"""A bench: candidates timed in interleaved rounds and their logits compared; a row for each candidate and batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.cpu import BFLOAT16_FEATURES, INT8_FEATURES, features, usable_cores
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, versions
from swin_quant.cards.paths import card_path
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import open_pictures
from swin_quant.score.candidate import BenchCandidate, Runner, Timing, interleave
from swin_quant.score.difference import difference
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import evenly


@dataclass(frozen=True)
class BenchRow:
    """One candidate at one batch. Latencies in ms of a batch, memory and file in MB, agreement and acc1 in percent.

    `speedup` is over `baseline`, a candidate's name, at the same batch: the median of the ratios within rounds.
    `sqnr_db` and `agreement` compare with the first candidate; None for that one, for equal logits, and if unmeasured.
    `failure` says why there is no latency.
    """

    candidate: str
    engine: str | None
    precision: str | None
    policy: str | None
    batch: int
    p50_ms: float | None
    p90_ms: float | None
    images_per_s: float | None
    calls: int
    baseline: str | None
    speedup: float | None
    peak_mb: float | None
    before_mb: float | None
    file_mb: float | None
    int8_gemms: int | None
    all_gemms: int | None
    sqnr_db: float | None
    agreement: float | None
    acc1: float | None
    library: str | None
    failure: str | None


@dataclass(frozen=True)
class BenchPlan:
    """The extent of a bench: `rounds`, each with at least `seconds` for each candidate, on `threads` threads."""

    batches: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    seconds: float = 1.0
    threads: int = field(default_factory=usable_cores)

    def __post_init__(self) -> None:
        for flag, value in (("‹rounds›", self.rounds), *(("‹batch›", batch) for batch in self.batches)):
            if value < 1:
                raise UsageError(f"{flag} {value}: must be at least 1")
        EngineOptions(threads=self.threads)
        if not 0 < self.seconds < 3600:
            raise UsageError(f"‹seconds› {self.seconds:g}: must be above 0 and below 3600")


@dataclass(frozen=True)
class BenchPictures:
    """Pictures to compare logits on: float32 [N, *shape], labels int64 [N] or None; `note` names them."""

    images: Tensor
    labels: Tensor | None
    note: str


@dataclass(frozen=True)
class BenchReport:
    """Rows, the first candidate of each batch being the reference, and the circumstances of the measurement.

    `gemms`: the type of each matrix product, by candidate. `cautions`: warnings of engines about this CPU.
    """

    name: str
    rows: list[BenchRow]
    reference: str
    plan: BenchPlan
    pictures: str
    versions: dict[str, Any] = field(default_factory=versions)
    int8_features: list[str] = field(default_factory=lambda: features(INT8_FEATURES))
    bfloat16_features: list[str] = field(default_factory=lambda: features(BFLOAT16_FEATURES))
    gemms: dict[str, dict[str, str]] = field(default_factory=dict)
    cautions: list[str] = field(default_factory=list)


def noise(count: int, shape: Sequence[int]) -> BenchPictures:
    """Seeded noise, good enough to measure latency and differences of logits when there are no pictures."""
    images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    return BenchPictures(images, None, f"{count} seeded noise pictures, not real ones")


def measure(
    name: str, candidates: Sequence[BenchCandidate], plan: BenchPlan, pictures: BenchPictures, has_classes: bool = True
) -> BenchReport:
    """Time `candidates` and compare their outputs with those of the first; `has_classes`: they are logits."""
    examined: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    chunk = min(len(pictures.images), max(plan.batches))

    def examine(runner: Runner) -> None:
        logits = torch.cat([runner.logits(images) for images in pictures.images.split(chunk)])
        examined[runner.name] = logits, runner.details()

    shape = pictures.images.shape[1:]
    timings = interleave(candidates, plan.batches, plan.rounds, plan.seconds, shape, plan.threads, examine)
    reference = candidates[0].name
    compared = {
        one: _compare(logits, examined, reference, pictures, has_classes) for one, (logits, _) in examined.items()
    }
    by_name = {candidate.name: candidate for candidate in candidates}
    details_of = {one: details for one, (_, details) in examined.items()}
    rows = [
        _row(by_name[one.candidate], one, timings, details_of.get(one.candidate, {}), compared.get(one.candidate, {}))
        for one in timings
    ]
    gemms = {one: details["gemms"] for one, details in details_of.items() if "gemms" in details}
    cautions = list(dict.fromkeys(caution for details in details_of.values() if (caution := details.get("caution"))))
    return BenchReport(name, rows, reference, plan, pictures.note, gemms=gemms, cautions=cautions)


def _compare(
    logits: Tensor, examined: Any, reference: str, pictures: BenchPictures, has_classes: bool
) -> dict[str, float | None]:
    """`acc1` if there are labels; `sqnr_db` and `agreement` with the reference's logits; other outputs have the SQNR
    alone."""
    found: dict[str, float | None] = {}
    if has_classes and pictures.labels is not None and (known := pictures.labels >= 0).any():
        found["acc1"] = 100 * (logits.argmax(1) == pictures.labels)[known].double().mean().item()
    if reference in examined and logits is not examined[reference][0]:
        other = difference(logits, examined[reference][0])
        found |= {"sqnr_db": other["sqnr_db"], "agreement": other["agreement"] if has_classes else None}
    return found


def _row(
    candidate: BenchCandidate, timing: Timing, timings: Sequence[Timing], details: Any, compared: dict[str, Any]
) -> BenchRow:
    same = (other for other in timings if other.batch == timing.batch and other.candidate == candidate.baseline)
    base = next(same, None)
    return BenchRow(
        candidate=candidate.name,
        batch=timing.batch,
        **{key: getattr(timing.identity, key, None) for key in ("engine", "precision", "policy", "before_mb")},
        p50_ms=timing.p50_ms,
        p90_ms=timing.p90_ms,
        images_per_s=timing.images_per_s,
        calls=timing.calls,
        baseline=candidate.baseline,
        speedup=timing.speedup(base) if base else None,
        peak_mb=timing.peak_mb,
        file_mb=candidate.file.stat().st_size / 1e6 if candidate.file and candidate.file.is_file() else None,
        **{key: details.get(key) for key in ("int8_gemms", "all_gemms", "library")},
        **{key: compared.get(key) for key in ("sqnr_db", "agreement", "acc1")},
        failure=timing.failure,
    )


def load_pictures(file: str, data_path: str, split: str, zip_mode: bool, count: int) -> BenchPictures:
    """`count` pictures of a data set, evenly spread over it, prepared as the card of `file` says."""
    preprocess = Preprocess.from_dict(RunCard.read(card_path(file)).preprocess)
    source = open_pictures(data_path, split, zip_mode=zip_mode)
    count = min(count, len(source))
    batch = next(load_batches(source, preprocess, [evenly(len(source), count)]))
    if not batch.indices:
        raise SwinQuantError(f"{data_path}: none of {count} pictures can be read: {listed(batch.unreadable)}")
    if batch.unreadable:
        log.warning("left out, unreadable: %s", listed(batch.unreadable))
    return BenchPictures(batch.images, batch.labels, f"{len(batch.indices)} pictures of {Path(data_path).name}/{split}")
