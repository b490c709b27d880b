"""Scoring engines on labelled pictures, a place on disk or batches: the results for a run card."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.progress import log, track
from swin_quant.cards.records import DatasetRecord, Result
from swin_quant.config.outputs import need_logits
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks, digest, shard
from swin_quant.score.engine import Engine
from swin_quant.score.metrics import BASELINE, evaluate, make_results, warn_about_guessing
from swin_quant.score.run_engines import readable_batches

BATCH = 32  # pictures at a time, where nobody says


@dataclass(frozen=True)
class ModelInputs:
    """How pictures become inputs, and the classes that labels are checked against; None where nobody says how many."""

    prepared: Prepared
    classes: int | None
    class_names: Sequence[str] = ()


def score_engines(
    engines: Mapping[str, Engine],
    source: PictureSet | Iterable[Any],
    by: ModelInputs,
    world: World = World(),
) -> dict[str, Result]:
    """A result for each engine by its key, all on the same pictures in one pass: a place on disk, or batches.

    An engine called `float32` comes first and is the baseline; without one there are no comparisons. Every rank scores
    its share of a place, and all return the same results. UsageError for labels that are missing or do not fit.
    """
    if isinstance(source, PictureSet):
        if by.classes is None:
            raise UsageError("the model does not say how many classes it has: give batches of (images, labels)")
        source = source.with_default_split("val")
        opened = source.open(by.classes, by.class_names, world)
        if source.count is not None:
            opened = SomePictures(opened, sorted(source.indices(opened)))
        dataset = dataset_record(source.path, source.split or "", opened)
        workers = default_workers(source.workers, world.size, len(opened) // world.size)
        wanted = source.batch or BATCH
        batch = min([wanted, *(engine.max_batch for engine in engines.values() if engine.max_batch)])
        if batch < wanted:
            log.info("batch %d instead of %d: the limit of an engine", batch, wanted)
        how = (dataset, batch, workers, world, source.max_unreadable)
        return score_pictures(engines, opened, by.prepared.known, *how)
    sizes, images, labels = list[int](), hashlib.sha256(), hashlib.sha256()  # hashes of values identify tensors

    def scored() -> Iterator[Batch]:
        total = len(source) if isinstance(source, Sized) else None
        for batch in track(batches(source, True, by.prepared, by.classes), "scoring", total, "batches"):
            sizes.append(len(batch.images))
            images.update(batch.images.numpy(force=True).tobytes())
            labels.update(batch.labels.numpy(force=True).tobytes())
            yield batch

    scores = evaluate(engines, scored(), world.device)
    if BASELINE in scores and by.classes:
        warn_about_guessing(scores[BASELINE].acc1, scores[BASELINE].pictures, by.classes)
    identity = hashlib.sha256(images.digest() + labels.digest()).hexdigest()
    tensors: DatasetRecord = {"name": "tensors", "split": "", "pictures": sum(sizes), "sha256": identity}
    return make_results(engines, scores, tensors, max(sizes), world.device)


def score_pictures(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    preprocess: Preprocess,
    dataset: DatasetRecord,
    batch_size: int,
    workers: int = 0,
    world: World = World(),
    max_unreadable: float | None = None,
) -> dict[str, Result]:
    """`score_engines` on labelled pictures that are open already. Warns of a float model that only guesses."""
    limit = UnreadableLimit(len(pictures), max_unreadable)
    share = chunks(shard(range(len(pictures)), world.rank, world.size), batch_size)
    loaded = readable_batches(pictures, preprocess, share, limit, workers, f"scoring {listed(engines, 2)}")
    scores = evaluate(engines, loaded, world.device)
    limit.count(gather(limit.names))
    if limit.names:
        log.warning("%d of %d pictures are unreadable: %s", len(limit.names), len(pictures), listed(limit.names))
    if BASELINE in scores:
        warn_about_guessing(scores[BASELINE].acc1, scores[BASELINE].pictures, len(pictures.class_names))
    return make_results(engines, scores, dataset, batch_size, world.device, sorted(limit.names))


def dataset_record(data_path: str, split: str, pictures: Pictures) -> DatasetRecord:
    """The pictures as a run card names them: without the machine's folders."""
    return DatasetRecord(name=Path(data_path).name, split=split, pictures=len(pictures), sha256=digest(pictures.names))


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
