"""Score a checkpoint, or artifacts on their engines, on labelled pictures: the float model first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import World, one_process, this_world
from swin_quant.base.errors import UsageError
from swin_quant.base.files import check_writable, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update, with_results
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import Result, sha256_in
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.data.picture_set import PictureSet, Source, asked_for
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import Exported, SubjectFiles, find_checkpoint, open_subject
from swin_quant.loading import ModelFile, open_baseline
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, policies_from, tell_bits
from swin_quant.quant.outputs import has_classes
from swin_quant.quant.policy import Policy
from swin_quant.quant.watch import eval_mode
from swin_quant.report.accuracy import AccuracyTable, as_html, render
from swin_quant.report.table import NARROW, html_facts, print_text, screen_width
from swin_quant.report.verdict import DeployVerdict, artifact_verdict
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.difference import FeatureScore, compare_engines
from swin_quant.score.engine import half_type
from swin_quant.score.options import EngineOptions
from swin_quant.score.scoring import ModelInputs, score_engines
from swin_quant.verbs.evaluate_artifacts import ELSEWHERE as ELSEWHERE
from swin_quant.verbs.evaluate_artifacts import Scoring, score_artifacts, write_cards
from swin_quant.verbs.timing import Latency, compare_latency

EXAMPLES = """swin-quant evaluate out/my_calib.pth --data-path imagenet
swin-quant evaluate out/my_calib.pth --data-path data --policy ft-mode1 ft-mode2 qdq
swin-quant evaluate my.pth --cfg my.yaml --data-path imagenet
swin-quant evaluate out/my_int8.onnx --data-path imagenet --engine onnxruntime
swin-quant evaluate out/my_int8.onnx --no-accuracy --batch 1
torchrun --nproc_per_node 2 -m swin_quant evaluate out/my_int8.onnx --data-path imagenet --threads 1"""

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

    def save_in(self, folder: Path, world: World) -> None:
        """Keep the results of a checkpoint: in its run card, else in a new card in `folder`."""
        if self.model is None or self.before is None or self.outputs or not world.is_main:
            return
        path = self.model.card_file or folder / f"{self.name}_eval.json"
        if self.model.card_file:
            self.model.card = update(path, self.before, lambda card: with_results(card, self.results))
        else:
            with one_at_a_time(path.parent):
                self.model.card = with_results(_with_earlier_results(self.before, path), self.results)
                self.model.card.write(path)
        log.info("run card: %s", path)

    def show(self) -> None:
        """Print the table as wide as the terminal, and the verdict."""
        if self.outputs:
            print(*self.outputs, sep="\n")
            return
        if self.results:
            AccuracyTable.from_cards(self.cards or [self.card]).show()
        if self.verdict:
            print_text("\n" + self.verdict.text(screen_width(NARROW)))

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        if self.outputs:
            return [score.to_dict() for score in self.outputs]
        told = {"verdicts": [self.verdict.to_dict()]} if self.verdict else {}
        return AccuracyTable.from_cards(self.cards or [self.card]).as_data() | told

    def __str__(self) -> str:
        if self.outputs:
            return "\n".join(map(str, self.outputs))
        table = [render(list(self.cards or [self.card]))] if self.results else []
        return "\n".join([*table, *([str(self.verdict)] if self.verdict else [])])

    def _repr_html_(self) -> str:
        if self.outputs:
            return html_facts(self.card.name, {score.subject: score.figures for score in self.outputs})
        table = as_html(list(self.cards or [self.card])) if self.results else ""
        return table + (self.verdict._repr_html_() if self.verdict else "")


@checked
def evaluate(
    model: Annotated[
        Model | nn.Module | Exported | str | Path | SubjectFiles, Fields(SubjectFiles, "model", ("files",))
    ],
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    policies: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    half: Literal["auto", "none", "float16", "bfloat16"] = "auto",
    original: Annotated[str | Path | None, Parameter(name="--float")] = None,
    engine: str | tuple[str, ...] | None = None,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    extension: tuple[str, ...] = (),
    fake_quant: bool = False,
    own_float: Annotated[bool, Parameter(negative="--no-own-float")] = True,
    no_accuracy: bool = False,
    batch_size: Annotated[int | None, Parameter(parse=False)] = None,
) -> Evaluation:
    """Score a model, or artifacts on their engines, on labelled pictures: float32, half precision, and quantized.

    Every engine sees the same pictures. Deltas and their paired standard error compare with the float model that the
    user had: `original`, or what the run card of a QAT checkpoint or of an artifact names, else the model itself with
    its nodes off. The results go into the model's card in memory, or into the artifact's beside it. A model without
    logits has SQNR and cosine against float32 instead, of all its outputs and of each by name, and needs no labels.

    Args:
        model: A model, a checkpoint, an artifact, or several artifacts.
        pictures: A place on disk, of which val is scored, or batches with labels.
        policies: One or several for a checkpoint (default: its run card's).
        half: half-precision baseline (default: the device's)
        original: the float checkpoint that QAT is compared with (default: looked for)
        engine: engines that run an artifact (default: the one it was exported for, else all)
        threads: threads of an engine (default: its own choice)
        float_type: type of float layers, where the engine chooses
        extension: openvino: libraries with operators of your own (docs/custom_operators.md)
        fake_quant: score the simulation beside an artifact
        own_float: score the float form on the engine beside an artifact
        no_accuracy: time the engines alone, in turns, on batches of seeded noise; no pictures are needed
        batch_size: Pictures at a time (default: 8, on a GPU 32): a latency is that of a batch in deployment.

    Returns:
        The results, the float model's first.

    Raises:
        SwinQuantError: An enabled node has no range, or an engine fails.
        UsageError: Options that do not fit the subject.
    """
    subject = model.subjects() if isinstance(model, SubjectFiles) else open_subject(model)
    source = asked_for(PictureSet() if pictures is None else pictures)
    if isinstance(source, PictureSet):
        source = replace(source, batch=source.batch or batch_size or BATCH[this_world().device.type])
        if isinstance(model, SubjectFiles) and not source.images:
            source = replace(source, split=source.split or "val")
    elif batch_size is not None and not no_accuracy:
        raise UsageError("‹batch_size›: is for pictures on disk: batches have the size that they are given with")
    timed = None
    if no_accuracy:
        one_process("evaluate --no-accuracy")
        timed = (source.batch if isinstance(source, PictureSet) else batch_size) or BATCH["cpu"]
    names = (engine,) if isinstance(engine, str) else tuple(engine or ())
    if isinstance(subject, list | Exported):
        exported = [subject] if isinstance(subject, Exported) else subject
        if policies is not None:
            raise UsageError(f"‹policy› is not for artifacts: {exported[0].file} has its own: leave it out")
        options = EngineOptions(threads, float_type, this_world().device.type, extensions=extension)
        scoring = Scoring(
            source,
            names or None,
            options,
            half,
            model.checkpoint if isinstance(model, SubjectFiles) else None,
            str(original) if original else None,
            fake_quant,
            own_float,
            exported[0].origin,
            timed,
        )
        return _score_artifacts(exported, scoring)
    for_artifacts = {"engine": names, "threads": threads, "extension": extension, "float_type": float_type}
    for_artifacts |= {"fake_quant": fake_quant, "own_float": not own_float}
    if wrong := [name for name, value in for_artifacts.items() if value]:
        raise UsageError(f"‹{wrong[0]}› is not for checkpoints: name an artifact")
    chosen = policies_from(policies)
    if isinstance(subject, ModelFile):
        subject = subject.load(chosen)
    chosen = chosen if policies is not None else subject.policies
    tell_bits(chosen)
    if isinstance(source, PictureSet):
        cfg = subject.given
        if cfg is not None and subject.preprocess != Preprocess.from_config(cfg):
            log.warning("preprocessing is that of the run card, which differs from the config: %s", subject.preprocess)
        scored = source.count or (cfg.DATA.SCORED or None if cfg is not None else None)
        source = replace(source.settled(cfg), count=scored)
    if subject.is_calibrated:
        check_bits(subject.module, subject.card, chosen, subject.name)
    if subject.card_file and timed is None:
        check_writable(subject.card_file)
    world = this_world(subject.device)
    baseline = open_baseline(subject, chosen, world, original, subject.given)
    before = subject.card  # which names the original now
    if timed is not None:
        engines = engines_beside(subject.module, world.device, half_type(half, world.device), chosen, baseline)
        shape = getattr(subject.module, "input_shape", None) or (3, *subject.preprocess.sides)
        with eval_mode(subject.module):
            return Evaluation((), subject.card, compare_latency(engines, timed, shape))
    found = score_model(subject, source, chosen, world, half, baseline)
    return replace(found, model=subject, before=before)


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
        by = ModelInputs(model.prepared, model.known_classes, model.class_names)
        results = score_engines(engines, pictures, by, world)
    scored = replace(model.card, results=[])
    for result in results.values():
        model.card, scored = model.card.with_result(result), scored.with_result(result)
    return Evaluation(tuple(results.values()), scored)


def _score_artifacts(exported: Sequence[Exported], scoring: Scoring) -> Evaluation:
    for one in exported if scoring.timed is None else ():
        check_writable(card_path(one.file))  # which gets the results
    found = score_artifacts([one.artifact for one in exported], scoring)
    if scoring.timed is not None:
        return Evaluation((), exported[0].card, tuple(latency for one in found for latency in one.latencies))
    if this_world().is_main:
        write_cards(found)
    cards = [with_results(replace(one.card, results=[]), one.measured) for one in found]
    results = tuple(result for one in found for result in one.measured)
    if len(found) > 1:
        return Evaluation(results, cards[0], cards=tuple(cards))
    place, checkpoint = getattr(scoring.pictures, "path", "DIR"), find_checkpoint(exported[0].artifact)
    verdict = artifact_verdict(cards[0], exported[0].file, checkpoint or Path("CHECKPOINT"), place)
    return Evaluation(results, cards[0], verdict=verdict)


def _with_earlier_results(card: RunCard, path: Path) -> RunCard:
    """A new card with the results that `path` holds of the same weights under the same preprocessing."""
    earlier = card.read(path) if path.exists() else card
    same = earlier.preprocess == card.preprocess and all(
        sha256_in(one) == sha256_in(other)
        for one, other in ((earlier.source, card.source), (earlier.checkpoint, card.checkpoint))
    )
    return replace(card, results=earlier.results) if same else card
