"""Scoring engines on the labelled pictures of a data set: the results for a run card."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import listed
from swin_quant.base.progress import log, track
from swin_quant.base.shards import Sharding
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import DatasetRecord, Result
from swin_quant.config.load import check_channels
from swin_quant.config.outputs import need_logits
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks, digest, sample, shard
from swin_quant.data.sources import open_pictures
from swin_quant.quant.policy import Policy
from swin_quant.quant.watch import eval_mode
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.engine import Engine, half_type
from swin_quant.score.metrics import BASELINE, evaluate, results_of, warn_of_guessing
from swin_quant.score.run_engines import readable_batches
from swin_quant.score.saved_predictions import PredictionFolder, score_and_save


def score_engines(
    engines: Mapping[str, Engine],
    cfg: CfgNode,
    preprocess: Preprocess,
    world: World = World(),
    split: str = "val",
    max_unreadable: float = 0.01,
    save_to: PredictionFolder | None = None,
    class_names: Sequence[str] = (),
) -> dict[str, Result]:
    """A result for each engine by its key, all on the same pictures in one pass.

    An engine called `float32` comes first and is the baseline; without one there are no comparisons. Every rank scores
    its share, and all return the same results. `save_to`: predictions are saved, and a run that was cut off goes on.
    """
    pictures = sample_of(open_labelled(cfg, split, world, class_names=class_names), cfg)
    dataset = dataset_record(cfg.DATA.DATA_PATH, split, pictures)
    workers = default_workers(cfg.DATA.NUM_WORKERS, world.size, len(pictures) // world.size)
    how = (dataset, cfg.DATA.BATCH_SIZE, workers, world, max_unreadable, save_to)
    return score_pictures(engines, pictures, preprocess, *how)


def score_pictures(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    preprocess: Preprocess,
    dataset: DatasetRecord,
    batch_size: int,
    workers: int = 0,
    world: World = World(),
    max_unreadable: float = 0.01,
    save_to: PredictionFolder | None = None,
) -> dict[str, Result]:
    """`score_engines` on labelled pictures that are open already. Warns of a float model that only guesses."""
    limit = UnreadableLimit(len(pictures), max_unreadable)

    def load(indices: Sequence[int]) -> Iterator[Batch]:
        batches = chunks(indices, batch_size)
        return readable_batches(pictures, preprocess, batches, limit, workers, f"scoring {listed(engines, 2)}")

    if save_to:
        about = {"preprocess": preprocess.to_dict(), "dataset": dataset, "batch_size": batch_size}
        scores = score_and_save(engines, pictures, load, limit, world, save_to.about(about))
    else:
        scores = evaluate(engines, load(shard(range(len(pictures)), world.rank, world.size)), world.device)
    limit.count(gather(limit.names))
    if limit.names:
        log.warning("%d of %d pictures are unreadable: %s", len(limit.names), len(pictures), listed(limit.names))
    if BASELINE in scores:
        warn_of_guessing(scores[BASELINE].acc1, scores[BASELINE].pictures, len(pictures.class_names))
    return results_of(engines, scores, dataset, batch_size, world.device, sorted(limit.names))


def dataset_record(data_path: str, split: str, pictures: Pictures) -> DatasetRecord:
    """The pictures as a run card names them: without the machine's folders."""
    return DatasetRecord(name=Path(data_path).name, split=split, pictures=len(pictures), sha256=digest(pictures.names))


def open_labelled(
    cfg: CfgNode, split: str, world: World, cache_mode: str | None = None, class_names: Sequence[str] = ()
) -> Pictures:
    """The labelled pictures of a split, their classes matched with the model's by name, or by number without names.

    `cache_mode` replaces DATA.CACHE_MODE; `class_names` are the model's, if they are known.
    """
    need_logits(cfg.MODEL.OUTPUT_KIND, "accuracy")
    return open_split(cfg, split, world, cache_mode, cfg.MODEL.NUM_CLASSES, class_names)


def sample_of(pictures: Pictures, cfg: CfgNode) -> Pictures:
    """A seeded sample of DATA.SCORED pictures, or all of them if that is 0."""
    if not cfg.DATA.SCORED:
        return pictures
    return SomePictures(pictures, sorted(sample(len(pictures), cfg.DATA.SCORED, cfg.SEED)))


def open_split(
    cfg: CfgNode,
    split: str,
    world: World,
    cache_mode: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
) -> Pictures:
    """The pictures of a split. With `classes` they have the model's labels; without, any labels or none."""
    check_channels(cfg)
    return open_pictures(
        cfg.DATA.DATA_PATH,
        split,
        zip_mode=cfg.DATA.ZIP_MODE,
        cache_mode=cache_mode or cfg.DATA.CACHE_MODE,
        num_classes=classes,
        class_names=class_names,
        rank=world.rank,
        world=world.size,
        track=lambda indices: track(indices, f"reading {split}", len(indices)),
    )


def score_model(
    model: nn.Module,
    cfg: CfgNode,
    card: RunCard,
    policies: Sequence[Policy] = (),
    world: World = World(),
    split: str = "val",
    half: str = "auto",
    max_unreadable: float = 0.01,
    baseline: Baseline | None = None,
    answers: Sharding | None = None,
) -> RunCard:
    """The card with a result for float32, half precision and each policy, on `split` of the config's data path.

    Preprocessing is the card's; the model's nodes must be calibrated for the policies. `baseline` (`find_baseline`):
    the models to compare a QAT model with. Every rank scores its share, and all return the same card. `answers`: the
    folder of saved predictions, where a run that was cut off goes on.
    """
    preprocess = Preprocess.from_dict(card.preprocess)
    if preprocess != Preprocess.from_config(cfg):
        log.warning("preprocessing is that of the run card, which differs from the config: %s", preprocess)
    engines = engines_beside(model, world.device, half_type(half, world.device), policies, baseline)
    whose = {"source": sha256_in(card.source), "checkpoint": sha256_in(card.checkpoint)}
    save_to = PredictionFolder(answers, whose) if answers else None
    with eval_mode(model):
        results = score_engines(engines, cfg, preprocess, world, split, max_unreadable, save_to, card.class_names)
    for result in results.values():
        card = card.with_result(result)
    return card


def sha256_in(record: Mapping[str, Any] | None) -> str | None:
    """The hash in a record of a card, if there is one."""
    return record["sha256"] if record else None
