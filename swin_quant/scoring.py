"""Scoring a model: float32 first, then half precision and the quantized model, on the same pictures."""

from dataclasses import asdict
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.data.loader import UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks, digest, shard
from swin_quant.data.sources import open_pictures
from swin_quant.distributed import World, gather
from swin_quant.engines import EAGER, FAKE_QUANT, HALF_TYPES, half_type, torch_engines
from swin_quant.errors import listed
from swin_quant.evaluate import Engine, Score, evaluate
from swin_quant.models.layers import Swin
from swin_quant.progress import log, track
from swin_quant.runcard import Result, RunCard


def score_model(
    model: Swin,
    cfg: CfgNode,
    card: RunCard,
    world: World = World(),  # noqa: B008
    split: str = "val",
    half: str = "auto",
    max_unreadable: float = 0.01,
) -> RunCard:
    """The card with a result for each precision of `model`, measured on `split` of the config's data path.

    Preprocessing is the card's. Every rank scores its share; all return the same card.
    """
    pictures = open_labelled(cfg, split, world)
    preprocess = Preprocess.from_dict(card.preprocess)
    if preprocess != Preprocess.from_config(cfg):
        log.warning("preprocessing is that of the run card, which differs from the config: %s", preprocess)
    engines = torch_engines(model, world.device, half_type(half, world.device))
    scores, unreadable = _score(engines, pictures, preprocess, cfg, world, max_unreadable)
    dataset = {
        "name": Path(cfg.DATA.DATA_PATH).name,
        "split": split,
        "pictures": len(pictures),
        "sha256": digest(pictures.names),
    }
    floats = {"float32", *HALF_TYPES}
    for precision, score in scores.items():
        quantized = precision not in floats
        measured = {key: value for key, value in asdict(score).items()}
        if precision == "float32":  # it is the baseline of the comparisons, not one of them
            measured |= {"agreement": None, "sqnr_db": None, "delta_acc1": None, "delta_acc1_se": None}
        result = Result(
            engine=FAKE_QUANT if quantized else EAGER,
            precision=precision,
            policy=(card.policy or {}).get("name") if quantized else None,
            dataset=dataset,
            batch_size=cfg.DATA.BATCH_SIZE,
            device=world.device.type,
            unreadable=len(unreadable),
            note=f"unreadable: {listed(unreadable)}" if unreadable else None,
            **measured,
        )
        card = card.with_result(result)
    return card


def open_labelled(cfg: CfgNode, split: str, world: World) -> Pictures:
    """The labelled pictures of a split, their number of classes checked against MODEL.NUM_CLASSES."""
    return open_pictures(
        cfg.DATA.DATA_PATH,
        split,
        zip_mode=cfg.DATA.ZIP_MODE,
        cache_mode=cfg.DATA.CACHE_MODE,
        num_classes=cfg.MODEL.NUM_CLASSES,
        rank=world.rank,
        world=world.size,
        track=lambda indices: track(indices, f"reading {split}", len(indices)),
    )


def _score(
    engines: dict[str, Engine],
    pictures: Pictures,
    preprocess: Preprocess,
    cfg: CfgNode,
    world: World,
    max_unreadable: float,
) -> tuple[dict[str, Score], list[str]]:
    batches = chunks(shard(range(len(pictures)), world.rank, world.size), cfg.DATA.BATCH_SIZE)
    workers = default_workers(cfg.DATA.NUM_WORKERS, world.size, len(pictures) // world.size)
    limit = UnreadableLimit(len(pictures), max_unreadable)

    def readable():
        loaded = load_batches(pictures, preprocess, batches, workers)
        for batch in track(loaded, f"scoring {', '.join(engines)}", len(batches)):
            limit.count(batch.unreadable)
            limit.check()
            yield batch

    scores = evaluate(engines, readable(), world.device)
    limit.count(gather(limit.names))
    limit.check()
    if limit.names:
        log.warning("%d of %d pictures are unreadable: %s", len(limit.names), len(pictures), listed(limit.names))
    return scores, sorted(limit.names)
