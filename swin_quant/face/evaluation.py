"""`evaluate`: the float model first, half precision, and what is quantized, on the same pictures."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import DatasetRecord, Result
from swin_quant.checkpoint.range_bits import check_bits
from swin_quant.config.outputs import need_logits
from swin_quant.data.loader import Batch, default_workers
from swin_quant.data.picture_set import PictureSet, Source, batches
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.model import Model
from swin_quant.quant.eval_mode import eval_mode
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy
from swin_quant.report.accuracy.render import as_html, render
from swin_quant.score.baseline import Baseline, engines_beside, find_baseline, missing, unnamed_baseline
from swin_quant.score.engine import Engine, half_type
from swin_quant.score.metrics import BASELINE, results_of, warn_of_guessing
from swin_quant.score.metrics import evaluate as score
from swin_quant.score.scoring import dataset_record, score_pictures


@dataclass(frozen=True)
class Evaluation:
    """Results on one list of pictures, the float model's first; printed, it is the accuracy-delta table."""

    results: tuple[Result, ...]
    card: RunCard

    def __str__(self) -> str:
        return render([self.card])

    def _repr_html_(self) -> str:
        return as_html([self.card])

    @property
    def float32(self) -> Result | None:
        """Of the float model that the user had; None where that was not to be had."""
        return next((result for result in self.results if result.precision == "float32"), None)

    @property
    def quantized(self) -> Result | None:
        """Of the first quantized engine."""
        return next((result for result in self.results if result.policy), None)


def evaluate(
    model: Model | nn.Module,
    pictures: Source,
    policies: Sequence[str | Policy] | None = None,
    *,
    half: str = "auto",
    batch_size: int = 32,
    original: str | Path | None = None,
) -> Evaluation:
    """Score `model` on labelled `pictures`: float32, half precision, and quantized under `policies` (None: its own).

    Every engine sees the same pictures; deltas and their paired standard error compare with the float model that the
    user had: `original`, or what the run card of a QAT checkpoint names, else the model itself with its nodes off. The
    results go into the model's card as well. SwinQuantError where an enabled node has no range.
    """
    model = model if isinstance(model, Model) else Model(model)
    if model.card.config:
        need_logits(model.config, "evaluate")
    own = [model.policy] if model.policy and model.is_calibrated else []
    chosen = own if policies is None else [load_policy(p) if isinstance(p, str) else p for p in policies]
    if model.is_calibrated:
        check_bits(model.module, model.card, chosen, model.name)
    world = World(device=model.device)
    baseline = _baseline(model, chosen, world, original)
    engines = engines_beside(model.module, model.device, half_type(half, model.device), chosen, baseline)
    with eval_mode(model.module):
        results = _results(engines, model, pictures, batch_size, world)
    scored = replace(model.card, results=[])
    for result in results.values():
        model.card, scored = model.card.with_result(result), scored.with_result(result)
    return Evaluation(tuple(results.values()), scored)


def _baseline(model: Model, policies: Sequence[Policy], world: World, original: str | Path | None) -> Baseline | None:
    if not model.card.has_own_weights and original is None:
        return None
    if original is None and not model.card.config:
        log.warning("%s", missing(model.card))
        return unnamed_baseline(model.card)
    folders = [model.file.resolve().parent] if model.file else []
    return find_baseline(model.card, folders, model.config, policies, world, str(original) if original else None)


def _results(
    engines: dict[str, Engine], model: Model, pictures: Source, batch_size: int, world: World
) -> dict[str, Result]:
    if isinstance(pictures, PictureSet):
        pictures = pictures.of_split("val")
        opened = _chosen(pictures, model)
        dataset = dataset_record(pictures.path, pictures.split or "", opened)
        workers = default_workers(8, 1, len(opened))
        return score_pictures(engines, opened, model.preprocess, dataset, batch_size, workers, world)
    seen = _Seen()
    total = len(pictures) if isinstance(pictures, Sized) else None
    given = batches(pictures, labelled=True, prepared=model.prepared)
    scores = score(engines, seen.through(track(given, "scoring", total)), world.device)
    with contextlib.suppress(KeyError, UsageError):  # no float, or it does not say how many classes it has
        warn_of_guessing(scores[BASELINE].acc1, scores[BASELINE].pictures, model.classes)
    return results_of(engines, scores, seen.dataset, max(seen.sizes), world.device)


class _Seen:
    """The tensors that were scored: how many, and a hash of their values, by which they are told from others."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.images, self.labels = hashlib.sha256(), hashlib.sha256()

    def through(self, source: Iterable[Batch]) -> Iterator[Batch]:
        for batch in source:
            self.sizes.append(len(batch.images))
            self.images.update(batch.images.numpy(force=True).tobytes())
            self.labels.update(batch.labels.numpy(force=True).tobytes())
            yield batch

    @property
    def dataset(self) -> DatasetRecord:
        digest = hashlib.sha256(self.images.digest() + self.labels.digest()).hexdigest()
        return DatasetRecord(name="tensors", split="", pictures=sum(self.sizes), sha256=digest)


def _chosen(pictures: PictureSet, model: Model) -> Pictures:
    opened = pictures.open(model.classes, model.class_names)
    return opened if pictures.count is None else SomePictures(opened, pictures.indices(opened))
