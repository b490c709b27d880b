"""The observation behind a calibration: a seeded sample of a place or a user's batches, ranges, and their record."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.base.progress import clock, log, span, track
from swin_quant.cards.records import CalibrationRecord, SearchRecord
from swin_quant.checkpoint.ranges import bits_record
from swin_quant.data.loader import DrawnBatches, Numbered
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import digest
from swin_quant.quant import CALIBRATED_ON
from swin_quant.quant.calibration import Calibration, Method, observing, set_ranges
from swin_quant.quant.check import PICTURES, Shown
from swin_quant.quant.quantizer import Role, named_nodes

_CHECKED = 100  # forward passes of pictures behind the observation: outlier channels, and the check of ranges
_BATCH = 8  # pictures at a time, at most


@dataclass(frozen=True)
class CalibrationBatches:
    """Numbered batches to calibrate on.

    Args:
        batches: The batches, each with its number.
        size: Pictures a number.
        record: The run card's part on the batches that were seen.
        class_names: Those of the pictures.
        count: How many batches, if that is known.
    """

    batches: Iterable[Numbered]
    size: int
    record: Callable[[Sequence[Numbered]], CalibrationRecord]
    class_names: Sequence[str] = ()
    count: int | None = None


def draw(pictures: PictureSet, transform: Transform, augment: bool = False) -> CalibrationBatches:
    """A seeded sample of training pictures, in the largest batches that divide it: ranges do not depend on batches.

    Args:
        pictures: A settled set.
        transform: Makes a tensor of a picture.
        augment: Whether the transform draws crops, for the record.
    """
    found = pictures.with_default_split("train")
    opened = found.open()
    count = min(len(opened), CALIBRATED_ON) if found.count is None else found.count
    largest = max(min(found.batch or _BATCH, _BATCH), 1)
    size = next(size for size in range(largest, 0, -1) if count % size == 0)
    seed, split = found.seed or 0, found.split or ""
    drawn = DrawnBatches(opened, transform, count, seed, size, found.max_unreadable or 0.0)

    def record(_: Sequence[Numbered]) -> CalibrationRecord:
        unreadable, names = drawn.unreadable(), drawn.names()
        if unreadable:
            log.warning("%d of %d pictures are unreadable: %s", len(unreadable), len(opened), listed(unreadable))
        sampled = {"batches": drawn.count, "batch_size": drawn.size, "seed": seed, "split": split}
        used = {"pictures_sha256": digest(names), "files": names, "unreadable": unreadable}
        return cast("CalibrationRecord", {**sampled, "augment": augment, "place": Path(found.path).name, **used})

    shown = track(drawn, "running the model", len(drawn), "batches")
    return CalibrationBatches(shown, drawn.size, record, opened.class_names, len(drawn))


def take(source: Iterable[Any], prepared: Prepared) -> CalibrationBatches:
    """Batches of any size, numbered by their first picture; a hash of their values stands for names."""

    def numbered() -> Iterator[Numbered]:
        total, first = len(source) if isinstance(source, Sized) else None, 0
        for batch in track(batches(source, labelled=False, prepared=prepared), "running the model", total, "batches"):
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


class Observed(NamedTuple):
    """A calibration and its record; its numbered batches, and the first pictures with their logits, for the check."""

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: list[Shown]
    images: list[tuple[int, Tensor]]


def observe_batches(model: nn.Module, shown: CalibrationBatches, method: Method, has_passes: bool = False) -> Observed:
    """Calibrate `model`: show it each batch, then search the ranges. `has_passes`: passes follow, which take longer."""
    device = next(model.parameters()).device
    seen: list[Numbered] = []
    some: list[Shown] = []
    start = clock()
    with observing(model, method) as observation:
        for number, batch in shown.batches:
            images = batch.images.to(device)
            logits = observation.show(images)
            seen.append((number, replace(batch, images=images)))
            if len(seen) == 1:  # which tries how batches can run
                start = clock()
            elif len(seen) == 2 and shown.count:
                seconds = (shown.count + _CHECKED / shown.size) * (clock() - start)
                log.info("calibration takes about %s in all%s", span(seconds), ", then come the passes" * has_passes)
            if (wanted := PICTURES - number * shown.size) > 0:
                some.append((images[:wanted], logits[:wanted]))
    calibration = observation.calibration()
    set_ranges(model, calibration, method)
    record: CalibrationRecord = {
        **shown.record(seen),
        "exact": method.exact,
        "pictures": calibration.pictures,
        "beyond_half": calibration.beyond_half,
        "check": None,
        "statistics": None,
        "advice": [],
        **search_record(method, model, calibration),
    }
    return Observed(calibration, record, method, some, [(number, batch.images) for number, batch in seen])


def search_record(method: Method, model: nn.Module, calibration: Calibration) -> SearchRecord:
    """How ranges were found in the observed values of the activation nodes that are on, or of all where none is."""
    nodes = [node for node in named_nodes(model).values() if node.role is not Role.GEMM_WEIGHT]
    on = [node for node in nodes if node.setting.enabled] or nodes
    methods = sorted({method.for_bits(node.setting.bits) for node in on})
    return {
        "method": "+".join(methods),
        "percentile": method.percentile if "percentile" in methods else None,
        "dead_nodes": calibration.dead,
        **bits_record(model, method),
    }
