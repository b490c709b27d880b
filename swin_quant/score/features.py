"""SQNR and cosine of a quantized model's outputs against the float model's: maps and embeddings have no accuracy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import FEATURES
from swin_quant.data.loader import Batch, UnreadableLimit, default_workers
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks
from swin_quant.quant.policy import Policy
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.difference import OutputDifference
from swin_quant.score.engine import Engine, half_type
from swin_quant.score.run_engines import readable_batches, run_engines
from swin_quant.score.scoring import open_split


@dataclass(frozen=True)
class FeatureScore:
    """An engine against float32: SQNR in dB (None if equal), and the mean cosine over pictures.

    `output`: the name of the output that was compared; None: all of them together.
    """

    engine: str
    precision: str
    policy: str | None
    pictures: int
    sqnr_db: float | None
    cosine: float
    output: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The score for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.subject}: {self.figures}"

    @property
    def subject(self) -> str:
        """The engine, and the output."""
        engine = " ".join(filter(None, (self.engine, self.precision, self.policy)))
        return f"{engine}, {self.output}" if self.output else engine

    @property
    def figures(self) -> str:
        sqnr = "equal" if self.sqnr_db is None else f"SQNR {self.sqnr_db:.2f} dB"
        return f"{sqnr}, cosine {self.cosine:.6f}, beside float32 on {self.pictures} pictures"


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
    engines = engines_beside(model, world.device, half_type(half, world.device), policies, baseline)
    preprocess = Preprocess.from_dict(card.preprocess)
    pictures = open_split(cfg, split, world)
    limit = UnreadableLimit(len(pictures), max_unreadable)
    size = cfg.DATA.BATCH_SIZE if preprocess.is_square or cfg.MODEL.OUTPUT_KIND != FEATURES else 1
    workers = default_workers(cfg.DATA.NUM_WORKERS, 1, len(pictures))
    parts = chunks(range(len(pictures)), size)
    batches = readable_batches(pictures, preprocess, parts, limit, workers, f"comparing {', '.join(engines)}")
    return compare_outputs(engines, batches, world.device)


def compare_outputs(
    engines: Mapping[str, Engine], batches: Iterable[Batch], device: torch.device, names: Sequence[str] = ()
) -> list[FeatureScore]:
    """The scores of all engines against the first, the float reference; then those of each output, if there are several
    `names`. UsageError if the first is not float32, and without a picture."""
    first, *others = engines
    if engines[first].precision != "float32":
        raise UsageError("outputs are compared with the original float model, which is not found: give ‹float› FILE")
    parts = [None, *(names if len(names) > 1 else ())]
    sums = {(part, key): OutputDifference() for part in parts for key in others}
    for _, found in run_engines(engines, batches, device):
        for (part, key), one in sums.items():
            pair = found[key].output, found[first].output
            one.add(*(pair if part is None else (output[names.index(part)] for output in pair)))
    if others and not sums[None, others[0]].pictures:
        raise UsageError("pictures: there is no batch to compare with")
    return [_score(engines[key], part, one) for (part, key), one in sums.items()]


def _score(engine: Engine, output: str | None, sums: OutputDifference) -> FeatureScore:
    found = sums.figures()
    how = (engine.name, engine.precision, engine.policy, sums.pictures, found["sqnr_db"], found["cosine"])
    return FeatureScore(*how, output=output)
