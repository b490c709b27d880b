"""A whole bench: line up, compare logits, time in interleaved rounds."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from swin_quant.base.progress import log
from swin_quant.bench.measure import BenchPictures, BenchPlan, BenchReport, measure, noise
from swin_quant.tasks.lineup import line_up


def bench(
    paths: Sequence[str],
    plan: BenchPlan,
    pictures: BenchPictures | None = None,
    engines: Sequence[str] | None = None,
    float_types: Sequence[str] | None = None,
    checkpoint: str | None = None,
    device: str = "cpu",
) -> BenchReport:
    """Measure artifacts and checkpoints of one model beside its float baselines; `line_up` says who competes."""
    with TemporaryDirectory(prefix="swin-quant-bench-") as workspace:
        found = line_up(paths, engines, float_types, checkpoint, Path(workspace), plan.threads, device)
        side = found.cfg.DATA.IMG_SIZE
        log.info("contenders: %s", ", ".join(contender.name for contender in found.contenders))
        return measure(found.card.name, found.contenders, plan, side, pictures or noise(64, 3, side))
