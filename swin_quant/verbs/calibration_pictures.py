"""The pictures that calibrate: how many, in which batches, and what a run card keeps of them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import track
from swin_quant.cards.records import CalibrationRecord
from swin_quant.data.calibration import Numbered, calibration_batches
from swin_quant.data.loader import UnreadableLimit
from swin_quant.data.picture_set import batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Preprocess, Transform
from swin_quant.data.sampling import digest
from swin_quant.quant.calibration import Method
from swin_quant.quant.names import CALIBRATED_ON
from swin_quant.quant.passes.plan import PassPlan

BATCH = 8  # pictures at a time, at most


@dataclass(frozen=True)
class CalibrationPlan:
    """Which pictures calibrate, and how ranges are chosen from them: `batches` of `batch_size`, seeded from `split`."""

    batches: int = CALIBRATED_ON // BATCH
    batch_size: int = BATCH
    split: str = "train"
    seed: int = 0
    augment: bool = False
    method: Method = Method()
    max_unreadable: float = 0.01
    passes: PassPlan = PassPlan()

    def __post_init__(self) -> None:
        for name, value in (("‹pictures›", self.batches), ("‹batch›", self.batch_size)):
            if value < 1:
                raise UsageError(f"{name} {value}: must be at least 1")

    @classmethod
    def of(cls, pictures: int | None = None, batch: int | None = None, **how: Any) -> "CalibrationPlan":
        """A plan for a number of pictures, in the largest batches that divide it: ranges do not depend on batches."""
        count = CALIBRATED_ON if pictures is None else pictures
        if count < 1:
            raise UsageError(f"‹pictures› {count}: must be at least 1")
        largest = min(batch or BATCH, BATCH)
        size = next(size for size in range(max(largest, 1), 0, -1) if count % size == 0)
        return cls(count // size, size, **how)

    @property
    def pictures(self) -> int:
        return self.batches * self.batch_size


@dataclass(frozen=True)
class CalibrationBatches:
    """This rank's numbered batches to calibrate on; `size` pictures a number. `record`: the run card's part on the
    batches that were seen."""

    batches: Iterable[Numbered]
    size: int
    record: Callable[[Sequence[Numbered]], CalibrationRecord]


def of_pictures(
    pictures: Pictures, transform: Transform, plan: CalibrationPlan, world: World, workers: int
) -> CalibrationBatches:
    """This rank's share of a seeded sample."""
    if isinstance(transform, Preprocess) and not transform.is_square:
        plan = replace(plan, batches=plan.pictures, batch_size=1)
    limit = UnreadableLimit(len(pictures), plan.max_unreadable)
    numbered = calibration_batches(
        pictures, transform, plan.pictures, plan.batch_size, plan.seed, limit, world.rank, world.size, workers
    )
    tracked = track(numbered, "calibrating", len(range(world.rank, plan.batches, world.size)))

    def record(seen: Sequence[Numbered]) -> CalibrationRecord:
        limit.count(gather(limit.names))
        indices = sorted(gather([(number, batch.indices) for number, batch in seen]))
        names = [pictures.names[index] for _, batch in indices for index in batch]
        sampled = {"batches": plan.batches, "batch_size": plan.batch_size, "seed": plan.seed, "split": plan.split}
        used = {"pictures_sha256": digest(names), "files": names, "unreadable": sorted(limit.names)}
        return cast("CalibrationRecord", {**sampled, "augment": plan.augment, **used})

    return CalibrationBatches(tracked, plan.batch_size, record)


def of_tensors(source: Iterable[Any], prepared: Prepared) -> CalibrationBatches:
    """Batches of any size, numbered by their first picture; a hash of their values stands for names."""

    def numbered() -> Iterator[Numbered]:
        total, first = len(source) if isinstance(source, Sized) else None, 0
        for batch in track(batches(source, labelled=False, prepared=prepared), "calibrating", total):
            yield first, batch
            first += len(batch.images)

    def record(seen: Sequence[Numbered]) -> CalibrationRecord:
        values = hashlib.sha256()
        for _, batch in seen:
            values.update(batch.images.numpy(force=True).tobytes())
        size = max(len(batch.images) for _, batch in seen)
        sampled = {"batches": len(seen), "batch_size": size, "seed": 0, "split": "", "augment": False}
        known = {"pictures_sha256": values.hexdigest(), "files": [], "unreadable": []}
        return cast("CalibrationRecord", {**sampled, **known})

    return CalibrationBatches(numbered(), 1, record)
