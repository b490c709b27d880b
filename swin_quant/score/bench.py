"""A whole bench: line up, compare logits, time in interleaved rounds; one row for each candidate and batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.cards.versions import versions
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import open_pictures
from swin_quant.score.candidate import BenchCandidate, Runner
from swin_quant.score.cpu import BFLOAT16_FEATURES, INT8_FEATURES, features, usable_cores
from swin_quant.score.difference import difference
from swin_quant.score.engine import EngineOptions
from swin_quant.score.interleave import Timing, interleave


@dataclass(frozen=True)
class BenchRow:
    """One candidate at one batch. Latencies in ms of a batch, memory and file in MB, agreement and acc1 in percent.

    `speedup` is over `baseline`, the candidate of that name, at the same batch: the median of the rounds' ratios.
    `sqnr_db` and `agreement` compare with the first candidate; None: it is that, or equal, or was not measured.
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
    """How much is measured: in each of `rounds`, each candidate for `seconds` at least, with so many `threads`."""

    batches: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    seconds: float = 1.0
    threads: int = field(default_factory=usable_cores)

    def __post_init__(self) -> None:
        for flag, value in (
            ("‹rounds›", self.rounds),
            *(("‹batch›", b) for b in self.batches),
        ):
            if value < 1:
                raise UsageError(f"{flag} {value}: must be at least 1")
        EngineOptions(threads=self.threads)
        if not 0 < self.seconds < 3600:
            raise UsageError(f"‹seconds› {self.seconds:g}: must be above 0 and below 3600")


@dataclass(frozen=True)
class BenchPictures:
    """What logits are compared on: images float32 [N, 3, side, side], labels int64 [N] or None, their name."""

    images: Tensor
    labels: Tensor | None
    note: str


@dataclass(frozen=True)
class BenchReport:
    """Rows, the first candidate of each batch being the reference, and what they were measured with.

    `cautions`: what engines say of this CPU that no figure does.
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


def noise(count: int, channels: int, side: int) -> BenchPictures:
    """Seeded pictures for where there are no others: good for latency, and for differences of logits only."""
    images = torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(0))
    return BenchPictures(images, None, f"{count} seeded noise pictures, not real ones")


def measure(
    name: str, candidates: Sequence[BenchCandidate], plan: BenchPlan, side: int, pictures: BenchPictures
) -> BenchReport:
    """Time `candidates` and compare their logits with those of the first.

    The core for other benchmarks too: a candidate is any picklable function that makes an engine.
    """
    examined: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    chunk = min(len(pictures.images), max(plan.batches))

    def examine(runner: Runner) -> None:
        logits = torch.cat([runner.logits(images) for images in pictures.images.split(chunk)])
        examined[runner.name] = logits, runner.details()

    timings = interleave(candidates, plan.batches, plan.rounds, plan.seconds, side, plan.threads, examine)
    reference = candidates[0].name
    compared = {one: _compare(logits, examined, reference, pictures) for one, (logits, _) in examined.items()}
    by_name = {candidate.name: candidate for candidate in candidates}
    rows = [
        _row(by_name[timing.candidate], timing, timings, examined.get(timing.candidate, (None, {}))[1],
             compared.get(timing.candidate, {}))
        for timing in timings
    ]  # fmt: skip
    gemms = {one: details["gemms"] for one, (_, details) in examined.items() if "gemms" in details}
    cautions = list(dict.fromkeys(said for _, details in examined.values() if (said := details.get("caution"))))
    return BenchReport(name, rows, reference, plan, pictures.note, gemms=gemms, cautions=cautions)


def _compare(logits: Tensor, examined: Any, reference: str, pictures: BenchPictures) -> dict[str, float | None]:
    """`acc1` where there are labels; `sqnr_db` and `agreement` with the reference's logits."""
    found: dict[str, float | None] = {}
    if pictures.labels is not None and (known := pictures.labels >= 0).any():
        found["acc1"] = 100 * (logits.argmax(1) == pictures.labels)[known].double().mean().item()
    if reference in examined and logits is not examined[reference][0]:
        other = difference(logits, examined[reference][0])
        found |= {"sqnr_db": other["sqnr_db"], "agreement": other["agreement"]}
    return found


def _row(
    candidate: BenchCandidate,
    timing: Timing,
    timings: Sequence[Timing],
    details: Any,
    compared: dict[str, float | None],
) -> BenchRow:
    same = (other for other in timings if other.batch == timing.batch and other.candidate == candidate.baseline)
    base = next(same, None)
    identity = timing.identity
    return BenchRow(
        candidate=candidate.name,
        engine=identity.engine if identity else None,
        precision=identity.precision if identity else None,
        policy=identity.policy if identity else None,
        batch=timing.batch,
        p50_ms=timing.p50_ms,
        p90_ms=timing.p90_ms,
        images_per_s=timing.images_per_s,
        calls=timing.calls,
        baseline=candidate.baseline,
        speedup=timing.speedup(base) if base else None,
        peak_mb=timing.peak_mb,
        before_mb=identity.before_mb if identity else None,
        file_mb=candidate.file.stat().st_size / 1e6 if candidate.file and candidate.file.is_file() else None,
        int8_gemms=details.get("int8_gemms"),
        all_gemms=details.get("all_gemms"),
        sqnr_db=compared.get("sqnr_db"),
        agreement=compared.get("agreement"),
        acc1=compared.get("acc1"),
        library=details.get("library"),
        failure=timing.failure,
    )


def load_pictures(file: str, data_path: str, split: str, zip_mode: bool, count: int) -> BenchPictures:
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
