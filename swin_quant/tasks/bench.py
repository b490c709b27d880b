"""A whole bench: line up, compare logits, time in interleaved rounds."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from swin_quant.base.progress import log
from swin_quant.score.bench import BenchPictures, BenchPlan, BenchReport, measure, noise
from swin_quant.tasks.bench_candidates import bench_candidates


def bench(
    paths: Sequence[str],
    plan: BenchPlan,
    pictures: BenchPictures | None = None,
    engines: Sequence[str] | None = None,
    float_types: Sequence[str] | None = None,
    checkpoint: str | None = None,
    device: str = "cpu",
) -> BenchReport:
    """Measure artifacts and checkpoints of one model beside its float baselines; see `bench_candidates`."""
    with TemporaryDirectory(prefix="swin-quant-bench-") as workspace:
        found = bench_candidates(paths, engines, float_types, checkpoint, Path(workspace), plan.threads, device)
        side = found.cfg.DATA.IMG_SIZE
        log.info("candidates: %s", ", ".join(candidate.name for candidate in found.candidates))
        return measure(found.card.name, found.candidates, plan, side, pictures or noise(64, 3, side))
