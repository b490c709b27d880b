"""A whole bench: line up, compare logits, time in interleaved rounds; one row for each contender and batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.bench.cpu import BFLOAT16_FEATURES, INT8_FEATURES, features, usable_cores
from swin_quant.bench.interleave import Timing, interleave
from swin_quant.bench.runner import Contender, Runner
from swin_quant.cards.versions import versions
from swin_quant.engines.difference import difference
from swin_quant.engines.options import EngineOptions


@dataclass(frozen=True)
class BenchRow:
    """One contender at one batch. Latencies in ms of a batch, memory and file in MB, agreement and acc1 in percent.

    `speedup` is over `baseline`, the contender of that name, at the same batch: the median of the rounds' ratios.
    `sqnr_db` and `agreement` compare with the first contender; None: it is that, or equal, or was not measured.
    `failure` says why there is no latency.
    """

    contender: str
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
    """How much is measured: in each of `rounds`, each contender for `seconds` at least, with so many `threads`."""

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
    """Rows, the first contender of each batch being the reference, and what they were measured with.

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
    name: str, contenders: Sequence[Contender], plan: BenchPlan, side: int, pictures: BenchPictures
) -> BenchReport:
    """Time `contenders` and compare their logits with those of the first.

    The core for other benchmarks too: a contender is any picklable function that makes an engine.
    """
    examined: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    chunk = min(len(pictures.images), max(plan.batches))

    def examine(runner: Runner) -> None:
        logits = torch.cat([runner.logits(images) for images in pictures.images.split(chunk)])
        examined[runner.name] = logits, runner.details()

    timings = interleave(contenders, plan.batches, plan.rounds, plan.seconds, side, plan.threads, examine)
    reference = contenders[0].name
    compared = {one: _compare(logits, examined, reference, pictures) for one, (logits, _) in examined.items()}
    by_name = {contender.name: contender for contender in contenders}
    rows = [
        _row(by_name[timing.contender], timing, timings, examined.get(timing.contender, (None, {}))[1],
             compared.get(timing.contender, {}))
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
    contender: Contender, timing: Timing, timings: Sequence[Timing], details: Any, compared: dict[str, float | None]
) -> BenchRow:
    same = (other for other in timings if other.batch == timing.batch and other.contender == contender.baseline)
    base = next(same, None)
    identity = timing.identity
    return BenchRow(
        contender=contender.name,
        engine=identity.engine if identity else None,
        precision=identity.precision if identity else None,
        policy=identity.policy if identity else None,
        batch=timing.batch,
        p50_ms=timing.p50_ms,
        p90_ms=timing.p90_ms,
        images_per_s=timing.images_per_s,
        calls=timing.calls,
        baseline=contender.baseline,
        speedup=timing.speedup(base) if base else None,
        peak_mb=timing.peak_mb,
        before_mb=identity.before_mb if identity else None,
        file_mb=contender.file.stat().st_size / 1e6 if contender.file and contender.file.is_file() else None,
        int8_gemms=details.get("int8_gemms"),
        all_gemms=details.get("all_gemms"),
        sqnr_db=compared.get("sqnr_db"),
        agreement=compared.get("agreement"),
        acc1=compared.get("acc1"),
        library=details.get("library"),
        failure=timing.failure,
    )
