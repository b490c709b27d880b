"""SQNR and cosine of a quantized backbone against the float one: maps and embeddings have no accuracy."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import FEATURES
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.quant.outputs import Output
from swin_quant.quant.policy import Policy
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.difference import difference_of_pairs
from swin_quant.score.engine import Engine, half_type
from swin_quant.score.run_engines import readable_batches, run_engines
from swin_quant.score.scoring import open_split, sample_of


@dataclass(frozen=True)
class FeatureScore:
    """An engine against float32: SQNR in dB (None if equal), and the mean cosine over pictures."""

    engine: str
    precision: str
    policy: str | None
    pictures: int
    sqnr_db: float | None
    cosine: float

    def to_dict(self) -> dict[str, Any]:
        """The score for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sqnr = "equal" if self.sqnr_db is None else f"SQNR {self.sqnr_db:.2f} dB"
        what = " ".join(filter(None, (self.engine, self.precision, self.policy)))
        return f"{what}: {sqnr}, cosine {self.cosine:.6f}, beside float32 on {self.pictures} pictures"


def score_features(
    model: nn.Module,
    cfg: CfgNode,
    card: RunCard,
    policies: Sequence[Policy],
    world: World = World(),
    split: str = "val",
    half: str = "auto",
    max_unreadable: float = 0.01,
    baseline: Baseline | None = None,
) -> list[FeatureScore]:
    """Scores of a backbone or an embedding in half precision and under each policy, on `split` of the data path.

    They compare with the model's own float32, or with the original's (`baseline`) if QAT or passes changed the weights.
    UsageError on several ranks, and if the original is not found.
    """
    if world.size > 1:
        raise UsageError("features are scored in one process: start it without torchrun")
    engines = list(engines_beside(model, world.device, half_type(half, world.device), policies, baseline).values())
    if engines[0].precision != "float32":
        raise UsageError("features are compared with the original float model, which is not found: give ‹float› FILE")
    preprocess = Preprocess.from_dict(card.preprocess)
    return [_compare(engines[0], engine, cfg, preprocess, world, split, max_unreadable) for engine in engines[1:]]


def _compare(
    reference: Engine,
    engine: Engine,
    cfg: CfgNode,
    preprocess: Preprocess,
    world: World,
    split: str,
    max_unreadable: float,
) -> FeatureScore:
    pictures = sample_of(open_split(cfg, split, world), cfg)
    limit = UnreadableLimit(len(pictures), max_unreadable)
    size = cfg.DATA.BATCH_SIZE if preprocess.is_square or cfg.MODEL.OUTPUT_KIND != FEATURES else 1
    workers = default_workers(cfg.DATA.NUM_WORKERS, 1, len(pictures))
    parts = chunks(range(len(pictures)), size)
    batches = readable_batches(pictures, preprocess, parts, limit, workers, f"comparing {engine.label}")
    seen = 0

    def pairs() -> Iterator[tuple[Output, Output]]:
        nonlocal seen
        for batch, found in run_engines({"quantized": engine, "float32": reference}, batches, world.device):
            seen += len(batch.indices)
            yield found["quantized"].output, found["float32"].output

    found = difference_of_pairs(pairs())
    return FeatureScore(engine.name, engine.precision, engine.policy, seen, found["sqnr_db"], found["cosine"])
