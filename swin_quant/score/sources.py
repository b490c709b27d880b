"""Scoring engines on the pictures that a function of Python is given: a place on disk, or batches."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import track
from swin_quant.cards.records import DatasetRecord, Result
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.pictures import SomePictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.sampling import chunks
from swin_quant.score.difference import FeatureScore, compare_outputs
from swin_quant.score.engine import Engine
from swin_quant.score.metrics import BASELINE, evaluate, results_of, warn_of_guessing
from swin_quant.score.run_engines import readable_batches
from swin_quant.score.scoring import dataset_record, score_pictures


@dataclass(frozen=True)
class Labelled:
    """The classes that labels are checked against, None where nobody says how many; and how batches are made."""

    prepared: Prepared
    classes: int | None
    class_names: Sequence[str] = ()
    batch_size: int = 32


def score_source(
    engines: Mapping[str, Engine], source: PictureSet | Iterable[Any], by: Labelled, world: World
) -> dict[str, Result]:
    """A result for each engine by its key, as `score_engines`. UsageError for labels that are missing or do not fit."""
    if isinstance(source, PictureSet):
        if by.classes is None:
            raise UsageError("the model does not say how many classes it has: give batches of (images, labels)")
        source = source.of_split("val")
        opened = source.open(by.classes, by.class_names)
        if source.count is not None:
            opened = SomePictures(opened, source.indices(opened))
        dataset = dataset_record(source.path, source.split or "", opened)
        size = min([by.batch_size, *(engine.max_batch for engine in engines.values() if engine.max_batch)])
        how = (dataset, size, default_workers(8, 1, len(opened)), world)
        return score_pictures(engines, opened, by.prepared.known, *how)
    seen = _Seen()
    total = len(source) if isinstance(source, Sized) else None
    given = batches(source, True, by.prepared, by.classes)
    scores = evaluate(engines, seen.through(track(given, "scoring", total)), world.device)
    if BASELINE in scores and by.classes:
        warn_of_guessing(scores[BASELINE].acc1, scores[BASELINE].pictures, by.classes)
    return results_of(engines, scores, seen.dataset, max(seen.sizes), world.device)


def compare_source(
    engines: Mapping[str, Engine], source: PictureSet | Iterable[Any], by: Labelled, names: Sequence[str], world: World
) -> list[FeatureScore]:
    """The outputs of each engine beside float32's, of all and of each by name; labels are not needed."""
    if not isinstance(source, PictureSet):
        return compare_outputs(engines, batches(source, False, by.prepared), world.device, names)
    source, known = source.of_split("val"), by.prepared.known
    opened = source.open()
    indices = list(range(len(opened))) if source.count is None else source.indices(opened)
    parts = chunks(indices, by.batch_size if known.is_square else 1)
    limit, workers = UnreadableLimit(len(indices), 0.01), default_workers(8, 1, len(indices))
    loaded = readable_batches(opened, known, parts, limit, workers, "comparing outputs")
    return compare_outputs(engines, loaded, world.device, names)


@dataclass
class _Seen:
    """The tensors that were scored: their number, and a hash of their values, which identifies them."""

    sizes: list[int] = field(default_factory=list)
    images: Any = field(default_factory=hashlib.sha256)
    labels: Any = field(default_factory=hashlib.sha256)

    def through(self, source: Iterable[Batch]) -> Iterator[Batch]:
        for batch in source:
            self.sizes.append(len(batch.images))
            self.images.update(batch.images.numpy(force=True).tobytes())
            self.labels.update(batch.labels.numpy(force=True).tobytes())
            yield batch

    @property
    def dataset(self) -> DatasetRecord:
        digest = hashlib.sha256(self.images.digest() + self.labels.digest()).hexdigest()
        return {"name": "tensors", "split": "", "pictures": sum(self.sizes), "sha256": digest}
