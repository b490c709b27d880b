"""Score a checkpoint, or artifacts on their engines, on labelled pictures: the float model first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swin_quant.arguments import checked
from swin_quant.base.errors import UsageError
from swin_quant.base.files import check_writable, ensure_writable_dir, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update, with_results
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import Result, sha256_in
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare, refuse_artifact_flags, refuse_checkpoint_flags
from swin_quant.cli.output import sharding, show_cards, tell
from swin_quant.config.outputs import LOGITS
from swin_quant.report.table import html_facts

if TYPE_CHECKING:
    from torch import nn
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.base.shards import Sharding
    from swin_quant.checkpoint.opened import Checkpoint
    from swin_quant.data.picture_set import PictureSet, Source
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.report.verdict import DeployVerdict
    from swin_quant.score.baseline import Baseline
    from swin_quant.score.difference import FeatureScore
    from swin_quant.verbs.evaluate_artifacts import Scored

EXAMPLES = """examples:
  swin-quant evaluate out/my_calib.pth --data-path imagenet                             (policy of its run card)
  swin-quant evaluate out/my_calib.pth --data-path data --policy ft-mode1 ft-mode2 qdq
  swin-quant evaluate my.pth --cfg my.yaml --data-path imagenet                         (a float checkpoint)
  swin-quant evaluate out/my_int8.onnx --data-path imagenet                             (every engine installed)
  swin-quant evaluate out/my_int8.onnx --data-path imagenet --answers answers           (Parquet; goes on if cut off)
  torchrun --nproc_per_node 2 -m swin_quant evaluate out/my_int8.onnx --data-path imagenet --threads 1 --answers two"""


@dataclass(frozen=True)
class ScoredSample:
    """How many pictures of the split are scored."""

    TITLE = "pictures"
    pictures: Annotated[int | None, Flag("score a seeded sample of so many (default: all)", "N", least=1)] = None

    def keys(self) -> dict[str, Any]:
        return {"DATA.SCORED": self.pictures} if self.pictures else {}


@dataclass(frozen=True)
class EvaluateOptions:
    """The subject that is scored, its pictures, and the baselines beside it."""

    files: Annotated[tuple[str, ...], Flag("a checkpoint, or artifacts with their run cards", "FILE", place=True)] = ()
    checkpoint: Annotated[
        str | None, Flag("to score, or what the artifacts were made from (default: looked for)", "FILE")
    ] = None
    model: shared.ModelOptions = shared.ModelOptions()
    replace_head: shared.ReplaceHead = False
    data: shared.ScoringOptions = shared.ScoringOptions()
    sample: ScoredSample = ScoredSample()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    engines: shared.EngineFlags = shared.EngineFlags()
    original: shared.Original = None
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None
    json: shared.Json = None
    split: Annotated[str, Rare("pictures to score")] = "val"
    all: Annotated[bool, Rare("show earlier results of the run card, too")] = False
    answers: Annotated[
        str | None, Flag("write answers to each picture there as Parquet, and go on if cut off", "DIR")
    ] = None
    shard: shared.Shard = None
    fake_quant: Annotated[bool, Rare("score the simulation beside an artifact")] = False
    no_own_float: Annotated[bool, Rare("do not score the float form on the engine beside an artifact")] = False


@dataclass(frozen=True)
class Evaluation:
    """Results on one list of pictures, the float model's first; printed, it is the accuracy-delta table.

    A model without logits has no `results`: its `outputs` are compared with float32's. An artifact has a `verdict`.
    """

    results: tuple[Result, ...]
    card: RunCard
    outputs: tuple[FeatureScore, ...] = ()
    verdict: DeployVerdict | None = None

    def __str__(self) -> str:
        from swin_quant.report.accuracy import render

        if self.outputs:
            return "\n".join(map(str, self.outputs))
        table = [render([self.card])] if self.results else []
        return "\n".join([*table, *([str(self.verdict)] if self.verdict else [])])

    def _repr_html_(self) -> str:
        from swin_quant.report.accuracy import as_html

        if self.outputs:
            return html_facts(self.card.name, {score.subject: score.figures for score in self.outputs})
        table = as_html([self.card]) if self.results else ""
        return table + (self.verdict._repr_html_() if self.verdict else "")

    @property
    def float32(self) -> Result | None:
        """The result of the float model that the user had; None where the model was not found."""
        return next((result for result in self.results if result.precision == "float32"), None)

    @property
    def quantized(self) -> Result | None:
        """The result of the first quantized engine."""
        return next((result for result in self.results if result.policy), None)


@checked
def evaluate(
    model: Model | nn.Module | Exported | str | Path,
    pictures: Source,
    policies: str | Policy | Sequence[str | Policy] | None = None,
    *,
    half: str = "auto",
    batch_size: int = 32,
    original: str | Path | None = None,
    engine: str | None = None,
) -> Evaluation:
    """Score a model, an artifact or the file of one on labelled `pictures`: float32, half precision, and quantized.

    A model is scored under `policies`, one or several (None: its own); an artifact on `engine` (None: the one that it
    was made for). Every engine sees the same pictures; deltas and their paired standard error compare with the float
    model that the user had: `original`, or what the run card of a QAT checkpoint or of an artifact names, else the
    model itself with its nodes off. The results go into the model's card in memory, or into the artifact's beside it. A
    model without logits has SQNR and cosine against float32 instead, of all its outputs and of each by name; its
    pictures need no labels. SwinQuantError where an enabled node has no range.
    """
    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.ranges import check_bits
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.exported import Exported, subject_of
    from swin_quant.loading import baseline_of
    from swin_quant.quant.policy import Policy, load_policy

    model, pictures = subject_of(model), source_of(pictures)
    if isinstance(pictures, PictureSet):
        pictures = replace(pictures, batch=batch_size)
    if isinstance(model, Exported):
        if policies is not None:
            raise UsageError(f"policies: {model.file} is an artifact, which has its own: leave them out")
        return _of_artifact(model, pictures, half, original, engine)
    if engine:
        raise UsageError(f"{model.name}: engine {engine} runs artifacts: export the model first")
    named = [policies] if isinstance(policies, str | Policy) else policies
    chosen = model.policies if named is None else [load_policy(one) for one in named]
    if model.is_calibrated:
        check_bits(model.module, model.card, chosen, model.name)
    world = World(device=model.device)
    return score_model(model, pictures, chosen, world, half, baseline_of(model, chosen, world, original))


def score_model(
    model: Model,
    pictures: PictureSet | Iterable[Any],
    policies: Sequence[Policy],
    world: World,
    half: str = "auto",
    baseline: Baseline | None = None,
    answers: Sharding | None = None,
) -> Evaluation:
    """Score a model for float32, half precision and each policy; the results go into its card in memory.

    Its nodes must be calibrated for the policies. `baseline`: what `baseline_of` found. Every rank scores its share,
    and all return the same. `answers`: the folder of saved predictions, where a run that was cut off goes on.
    """
    from swin_quant.quant.outputs import has_classes
    from swin_quant.quant.watch import eval_mode
    from swin_quant.score.baseline import engines_beside
    from swin_quant.score.difference import compare_engines
    from swin_quant.score.engine import half_type
    from swin_quant.score.saved_predictions import PredictionFolder
    from swin_quant.score.scoring import ModelInputs, score_engines

    engines = engines_beside(model.module, world.device, half_type(half, world.device), policies, baseline)
    with eval_mode(model.module):
        if not has_classes(model.module):
            names: Sequence[str] = getattr(model.module, "output_names", ())
            return Evaluation((), model.card, tuple(compare_engines(engines, pictures, model.prepared, names, world)))
        whose = {"source": sha256_in(model.card.source), "checkpoint": sha256_in(model.card.checkpoint)}
        save_to = PredictionFolder(answers, whose) if answers else None
        by = ModelInputs(model.prepared, model.known_classes, model.class_names)
        results = score_engines(engines, pictures, by, world, save_to)
    scored = replace(model.card, results=[])
    for result in results.values():
        model.card, scored = model.card.with_result(result), scored.with_result(result)
    return Evaluation(tuple(results.values()), scored)


def scored_on(cfg: CfgNode, model: Model, split: str = "val", max_unreadable: float = 0.01) -> PictureSet:
    """The pictures of the config's data path that score a model, prepared as its card says."""
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.data.preprocess import Preprocess

    if model.preprocess != Preprocess.from_config(cfg):
        log.warning("preprocessing is that of the run card, which differs from the config: %s", model.preprocess)
    return PictureSet.of_config(cfg, split, max_unreadable=max_unreadable)


def _of_artifact(
    exported: Exported,
    pictures: PictureSet | Iterable[Any],
    half: str,
    original: str | Path | None,
    engine: str | None,
) -> Evaluation:
    from swin_quant.base.distributed import World
    from swin_quant.exported import find_checkpoint
    from swin_quant.report.verdict import of_artifact
    from swin_quant.verbs.evaluate_artifacts import Scoring, score_artifacts, write_cards

    scoring = Scoring(
        [engine] if engine else None,
        half=half,
        original=str(original) if original else None,
        pictures=pictures,
        origin=exported.origin,
        own_float=True,
    )
    (scored,) = score_artifacts([exported.artifact], scoring, World())
    write_cards([scored])
    card, file = with_results(replace(scored.card, results=[]), scored.measured), exported.file
    place, checkpoint = getattr(pictures, "path", "DIR"), find_checkpoint(exported.artifact)
    return Evaluation(scored.measured, card, verdict=of_artifact(card, file, checkpoint or Path("CHECKPOINT"), place))


def run(options: EvaluateOptions, world: World) -> None:
    from swin_quant.exported import is_checkpoint
    from swin_quant.verbs.evaluate_artifacts import write_cards

    files, checkpoint = options.files, options.checkpoint
    if len(files) == 1 and is_checkpoint(files[0]):
        if checkpoint:
            raise UsageError(f"{files[0]} and --checkpoint {checkpoint} are both checkpoints: give one of them")
        checkpoint, files = files[0], ()
    if files:
        mine = EvaluateOptions(replace_head=options.replace_head, output=options.output)
        refuse_checkpoint_flags(options.model, options.policy, mine)
    else:
        mine = EvaluateOptions(fake_quant=options.fake_quant, no_own_float=options.no_own_float)
        refuse_artifact_flags(options.engines, mine)
    if options.shard is not None and options.answers is None:
        raise UsageError("--shard: is for --answers")
    if files:
        scored = score_files(replace(options, files=files), world)
        if world.is_main:
            written = write_cards(scored)
            measured = [with_results(replace(one.card, results=[]), one.measured) for one in scored]
            show_cards(written if options.all else measured, options.json)
    elif opened := shared.opened(checkpoint):
        evaluate_checkpoint(options, opened, world)
    else:
        raise UsageError("nothing to score: name a checkpoint or an artifact")


def score_files(options: EvaluateOptions, world: World) -> list[Scored]:
    """The artifacts that options name, scored; nothing is printed or written."""
    from swin_quant.backends.open_artifact import open_artifact
    from swin_quant.verbs.evaluate_artifacts import Scoring, score_artifacts

    scoring = Scoring(
        options.engines.engine or None,
        options.engines.options(world.device.type),
        shared.OTHER_MACHINE | options.data.keys() | options.sample.keys() | options.run.keys(),
        options.checkpoint,
        options.split,
        options.data.half,
        options.fake_quant,
        options.data.max_unreadable,
        options.original,
        sharding(options.answers, options.shard),
        own_float=not options.no_own_float and options.answers is None,
    )
    artifacts = [open_artifact(path) for path in dict.fromkeys(options.files)]
    for artifact in artifacts:
        check_writable(card_path(artifact.file))  # which gets the results
    return score_artifacts(artifacts, scoring, world)


def evaluate_checkpoint(
    options: EvaluateOptions, checkpoint: Checkpoint, world: World, folder: Path | None = None
) -> RunCard:
    """Score a checkpoint, show the results and keep them: in its run card, else in a new card in `folder`."""
    from swin_quant.loading import baseline_of, load_for_scoring

    data = options.data
    cfg = shared.config_of(checkpoint, options.model, data, options.sample, options.run, OUTPUT=options.output)
    model, policies = load_for_scoring(cfg, checkpoint, options.policy.policies(), world, options.replace_head)
    shared.tell_bits(policies)
    folder = folder or shared.output_dir(options.output, cfg)
    path = model.card_file or folder / f"{cfg.MODEL.NAME}_eval.json"
    ensure_writable_dir(path.parent)
    baseline = baseline_of(model, policies, world, options.original, cfg)
    if options.answers and cfg.MODEL.OUTPUT_KIND != LOGITS:
        raise UsageError("--answers is for classifiers: maps and embeddings name no class")
    before = model.card if model.card_file else _with_earlier_results(model.card, path)
    pictures = scored_on(cfg, model, options.split, data.max_unreadable)
    answers = sharding(options.answers, options.shard)
    found = score_model(model, pictures, policies, world, data.half, baseline, answers)
    if cfg.MODEL.OUTPUT_KIND != LOGITS:
        scores = found.outputs
        tell(options.json, lambda: print(*scores, sep="\n"), [score.to_dict() for score in scores])
    elif world.is_main:
        model.card = _kept(model, before, found.results, path)
        log.info("run card: %s", path)
        show_cards([model.card if options.all else found.card], options.json)
    return model.card


def _kept(model: Model, before: RunCard, results: Sequence[Result], path: Path) -> RunCard:
    """The card at `path`, with the results in addition to `before`; another process may have changed it."""
    if model.card_file:
        return update(path, before, lambda card: with_results(card, results))
    with one_at_a_time(path.parent):
        card = with_results(_with_earlier_results(before, path), results)
        card.write(path)
    return card


def _with_earlier_results(card: RunCard, path: Path) -> RunCard:
    """A new card with the results that `path` holds of the same weights under the same preprocessing."""
    earlier = card.read(path) if path.exists() else card
    same = earlier.preprocess == card.preprocess and all(
        sha256_in(one) == sha256_in(other)
        for one, other in ((earlier.source, card.source), (earlier.checkpoint, card.checkpoint))
    )
    return replace(card, results=earlier.results) if same else card
