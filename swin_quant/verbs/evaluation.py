"""The results of scoring a model or artifacts, and how a model is scored."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.files import one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update, with_results
from swin_quant.cards.records import Result, sha256_in
from swin_quant.data.picture_set import PictureSet
from swin_quant.model import Model
from swin_quant.quant.outputs import has_classes
from swin_quant.quant.policy import Policy
from swin_quant.quant.watch import eval_mode
from swin_quant.report.accuracy import AccuracyTable
from swin_quant.report.table import NARROW, html_facts, print_text, screen_width
from swin_quant.report.verdict import DeployVerdict
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.engine import half_type
from swin_quant.score.run_engines import FeatureScore, compare_engines
from swin_quant.score.scoring import ModelInputs, score_engines
from swin_quant.verbs.timing import Latency

BATCH = {"cpu": 8, "cuda": 32}  # pictures at a time: latencies are of batches as in deployment


@dataclass(frozen=True)
class Evaluation:
    """Results on one list of pictures, the float model's first; printed, it is the accuracy-delta table.

    A model without logits has no `results`: its `outputs` are compared with float32's. Without accuracy, `outputs` are
    latencies. One artifact has a `verdict`; several have a card each in `cards`.
    """

    results: tuple[Result, ...]
    card: RunCard
    outputs: tuple[FeatureScore, ...] | tuple[Latency, ...] = ()
    verdict: DeployVerdict | None = None
    cards: tuple[RunCard, ...] = ()
    model: Model | None = None
    before: RunCard | None = None  # the model's card before it was scored

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def float32(self) -> Result | None:
        """The result of the float model that the user had; None where the model was not found."""
        return next((result for result in self.results if result.precision == "float32"), None)

    @property
    def quantized(self) -> Result | None:
        """The result of the first quantized engine."""
        return next((result for result in self.results if result.policy), None)

    @property
    def _table(self) -> AccuracyTable:
        return AccuracyTable.from_cards(self.cards or [self.card])

    def save_in(self, folder: Path, world: World) -> None:
        """Keep the results of a checkpoint: in its run card, else in a new card in `folder`."""
        if self.model is None or self.before is None or self.outputs or not world.is_main:
            return
        path = self.model.card_file or folder / f"{self.name}_eval.json"
        if self.model.card_file:
            self.model.card = update(path, self.before, lambda card: with_results(card, self.results))
        else:
            with one_at_a_time(path.parent):
                card, earlier = self.before, self.before.read(path) if path.exists() else self.before
                origins = ((earlier.source, card.source), (earlier.checkpoint, card.checkpoint))
                if earlier.preprocess == card.preprocess and all(sha256_in(a) == sha256_in(b) for a, b in origins):
                    card = replace(card, results=earlier.results)  # of the same weights
                self.model.card = with_results(card, self.results)
                self.model.card.write(path)
        log.info("run card: %s", path)

    def show(self) -> None:
        """Print the table as wide as the terminal, and the verdict."""
        if self.outputs:
            print(*self.outputs, sep="\n")
            return
        if self.results:
            self._table.show()
        if self.verdict:
            print_text("\n" + self.verdict.text(screen_width(NARROW)))

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        if self.outputs:
            return [score.to_dict() for score in self.outputs]
        told = {"verdicts": [self.verdict.to_dict()]} if self.verdict else {}
        return self._table.as_data() | told

    def __str__(self) -> str:
        if self.outputs:
            return "\n".join(map(str, self.outputs))
        table = [self._table.text("terminal")] if self.results else []
        return "\n".join([*table, *([str(self.verdict)] if self.verdict else [])])

    def _repr_html_(self) -> str:
        if self.outputs:
            return html_facts(self.card.name, {score.subject: score.figures for score in self.outputs})
        table = self._table.html() if self.results else ""
        return table + (self.verdict._repr_html_() if self.verdict else "")


class Evaluated:
    """A result that holds an evaluation, and is shown as it."""

    evaluation: Evaluation

    def show(self) -> None:
        """Print the table as wide as the terminal, and the verdict."""
        self.evaluation.show()

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        return self.evaluation.to_json()

    def __str__(self) -> str:
        return str(self.evaluation)

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_()


def score_model(
    model: Model,
    pictures: PictureSet | Iterable[Any],
    policies: Sequence[Policy],
    world: World,
    half: str = "auto",
    baseline: Baseline | None = None,
) -> Evaluation:
    """Score a model for float32, half precision and each policy; the results go into its card in memory.

    Its nodes must be calibrated for the policies. `baseline`: what `open_baseline` found. Every rank scores its share,
    and all return the same.
    """
    engines = engines_beside(model.module, world.device, half_type(half, world.device), policies, baseline)
    with eval_mode(model.module):
        if not has_classes(model.module):
            names: Sequence[str] = getattr(model.module, "output_names", ())
            return Evaluation((), model.card, tuple(compare_engines(engines, pictures, model.prepared, names, world)))
        classes = None
        with contextlib.suppress(UsageError):  # it need not say how many
            classes = model.classes
        by = ModelInputs(model.prepared, classes, model.class_names)
        results = score_engines(engines, pictures, by, world)
    scored = replace(model.card, results=[])
    for result in results.values():
        model.card, scored = model.card.with_result(result), scored.with_result(result)
    return Evaluation(tuple(results.values()), scored)
