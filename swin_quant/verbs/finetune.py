"""QAT: fine-tune a calibrated checkpoint with its nodes on: writes <NAME>_qat.pth, its run card, logs; scores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.base.errors import UsageError, called
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import original_of
from swin_quant.cards.records import RangesRecord
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare
from swin_quant.cli.output import show_cards
from swin_quant.config.outputs import LOGITS
from swin_quant.train.recipe import Recipe, load_recipe
from swin_quant.verbs.train import TrainingOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import Checkpoint, OpenedCheckpoint
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.report.verdict import DeployVerdict
    from swin_quant.train.run import Request, Trained
    from swin_quant.verbs.evaluate import Evaluation

EXAMPLES = """examples:
  swin-quant finetune out/my_calib.pth --data-path imagenet --recipe qat_tiny --distill
                                                                                        (policy of its run card)
  swin-quant finetune out/my_calib.pth --data-path data --recipe micro_w4a4 --policy ft-mode1 \\
      --wprec 4 --aprec 4 --teacher my.pth
  torchrun --nproc_per_node 4 qat_finetune.py ... --continue                             (goes on where it stopped)"""
DEFAULT_RECIPE = "qat_tiny"
# Maps and embeddings have no labels: they are learned from the float model's.
_OF_FEATURES = {"distill.weight": 0.0, "distill.features": 1.0, "augment.mixup": 0.0, "augment.cutmix": 0.0}


@dataclass(frozen=True)
class QatOptions:
    """Options of QAT beside the options of training: a teacher, and the mode of ranges."""

    TITLE = "QAT"
    distill: Annotated[bool, Flag("learn from a teacher (distill.weight 1 if it is 0)")] = False
    teacher: Annotated[
        str | None, Flag("float checkpoint of the same classes to learn from (default: the original)", "FILE")
    ] = None
    teacher_cfg: Annotated[str | None, Rare("its configuration, if it is another model", "FILE")] = None
    distill_weight: Annotated[float | None, Rare("distill.weight", "W")] = None
    temperature: Annotated[float | None, Rare("distill.temperature", "T")] = None
    distill_compat: Annotated[Literal["none", "ft"] | None, Rare("ft: FasterTransformer's loss, to the letter")] = None
    amax: Annotated[Literal["frozen", "learned", "reestimated"] | None, Flag("amax.mode: how ranges are trained")] = (
        None
    )

    def change(self, recipe: Recipe, training: TrainingOptions, batch: int | None) -> Recipe:
        """`recipe` as `training`, --distill and --teacher change it."""
        keys = {
            "distill.compat": self.distill_compat,
            "distill.weight": self.distill_weight,
            "distill.temperature": self.temperature,
            "amax.mode": self.amax,
        }
        recipe = training.change(recipe, batch, **keys)
        if (self.distill and not recipe.distill.weight) or (self.teacher and not recipe.distill.on):
            return recipe.having({"distill.weight": 1.0}, "--distill")
        return recipe


@dataclass(frozen=True)
class FinetuneOptions:
    """Which checkpoint is fine-tuned, on which pictures, under which policy, and how."""

    checkpoint: shared.Calibrated = None
    model: shared.ModelOptions = shared.ModelOptions()
    replace_head: shared.ReplaceHead = False
    data: shared.ScoringOptions = shared.ScoringOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    training: TrainingOptions = TrainingOptions()
    no_eval: shared.NoEval = False
    qat: QatOptions = QatOptions()
    original: shared.Original = None
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None
    json: shared.Json = None


@dataclass(frozen=True)
class Finetuned:
    """The checkpoint that QAT wrote, and its results; printed, the accuracy-delta table and the verdict."""

    file: Path
    evaluation: Evaluation

    @property
    def verdict(self) -> DeployVerdict | None:
        """Whether to deploy QAT or to keep PTQ; None where no val was scored."""
        return self.evaluation.verdict

    def load(self) -> Model:
        """The model that was trained."""
        from swin_quant.loading import load

        return load(self.file)

    def __str__(self) -> str:
        return str(self.evaluation) or f"{self.file}: not scored: the pictures have no val split"

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_() or self.load()._repr_html_()


@checked
def finetune(
    model: Model | str | Path,
    pictures: PictureSet | str | Path,
    folder: str | Path,
    recipe: str = DEFAULT_RECIPE,
    policy: str | Policy | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    distill: bool = False,
    teacher: str | Path | None = None,
    amax: Literal["frozen", "learned", "reestimated"] | None = None,
    original: str | Path | None = None,
    config: str | Path | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
) -> Finetuned:
    """QAT of a calibrated model as `swin-quant finetune` does it: writes <NAME>_qat.pth into `folder`, and scores it.

    `pictures`: a place with train and val. `policy` None: the model's. `recipe`: a shipped one or a YAML file, of which
    `changes` sets keys, {"optimizer.lr": 1e-4}; the rest are the command's flags. A model that is in no file yet is
    saved in the folder first. `resume` goes on with a run that was cut off, `overwrite` replaces one. UsageError for a
    model that is not calibrated, and for a wrapped module: train it in your own loop.
    """
    from swin_quant.base.distributed import world_on
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.exported import model_of
    from swin_quant.quant.policy import load_policy
    from swin_quant.verbs.export import file_of

    source = source_of(pictures)
    if not isinstance(source, PictureSet) or source.split or source.count:
        raise UsageError("pictures: training reads train and val of a place on disk: give its path")
    if isinstance(model, str | Path):
        file = str(model)
    else:
        model = model_of(model)
        if not model.card.config:
            raise UsageError(f"{model.name}: is a module of your own: train it in your own loop, its nodes on")
        model.need_calibrated()
        file = str(file_of(model, ensure_writable_dir(folder)))
    options = FinetuneOptions(
        file,
        shared.ModelOptions(cfg=str(config) if config else None, opts=shared.upright_opts(source)),
        data=shared.ScoringOptions(data_path=source.path, batch=batch_size),
        training=TrainingOptions(recipe, epochs=epochs, go_on=resume, overwrite=overwrite),
        qat=QatOptions(distill, str(teacher) if teacher else None, amax=amax),
        original=str(original) if original else None,
        run=shared.RunOptions(seed=source.seed if isinstance(pictures, PictureSet) else None),
    )
    chosen = [load_policy(policy)] if policy else []
    with called(**{"continue": "resume", "output": "folder", "batch": "batch_size"}):
        start = _start(options)
        return finetune_and_score(options, *start, Path(folder), world_on(device), chosen, changes)


def train_quantized(
    cfg: CfgNode, recipe: Recipe, request: Request, policies: Sequence[Policy], world: World
) -> Trained:
    """QAT of the calibrated checkpoint `request.start` under a policy (else its run card's); writes <NAME>_qat.pth.

    A model of maps or an embedding needs no labels: it learns to give the float model's outputs.
    The result is calibrated as well, in the same formats, and no weight of it lies outside its range.
    """
    from swin_quant.cards import lineage
    from swin_quant.loading import baseline_of, load_for_scoring
    from swin_quant.model import save_with_card
    from swin_quant.quant.policy import enabled_nodes, quantize
    from swin_quant.train.amax import settle_granularity
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.run import Trained, refuse_to_replace, run_training, training_config, with_batch_size

    with only_writer(request.folder, world):
        recipe = with_batch_size(recipe, cfg)
        if cfg.MODEL.OUTPUT_KIND != LOGITS:
            recipe = recipe.having(_OF_FEATURES, "a backbone")
        if not request.start:
            raise UsageError("no checkpoint: give the calibrated one (with ‹continue›, too)")
        path = request.folder / f"{cfg.MODEL.NAME}_qat.pth"
        refuse_to_replace(path, request)
        if not request.resume:
            lineage.refuse_to_replace(path)
        found_anew = recipe.amax.initial == "reestimated" and recipe.amax.weights and recipe.amax.activations
        start, found = load_for_scoring(
            training_config(cfg, recipe), request.start, policies, world, any_bits=found_anew
        )
        if len(found) != 1:
            raise UsageError(
                f"{request.start}: is not calibrated: run `swin-quant calibrate` first, QAT starts from there"
            )
        if request.original:
            baseline_of(start, found, world, request.original, cfg)  # refuses another file, and names it without a card
        model, policy = start.network, found[0]
        if not enabled_nodes(model):
            raise UsageError(f"policy {policy.name} quantizes nothing: choose another, or `swin-quant train` for float")
        quantize(model)
        # Snapshots are compared with the model, and have the ranges that training gives it.
        settle_granularity(model, enabled_nodes(model))
        request = replace(request, teacher=_teacher(request, recipe, start.card))
        model, position, record, named = run_training(model, cfg, recipe, request, world, start.class_names, policy)
        if start.card.training and "ranges" in start.card.training:  # one learned before was not calibrated
            now, before = record["ranges"], start.card.training["ranges"]
            record["ranges"] = RangesRecord(
                weights=now["weights"] or before["weights"], activations=now["activations"] or before["activations"]
            )
        card = start.card.with_new_weights(policy=policy.to_dict(), training=record, class_names=named)
        if world.is_main:
            card = save_with_card(model, path, card, by_channel=True)
        return Trained(model, path, card, position)


def _teacher(request: Request, recipe: Recipe, card: RunCard) -> str | None:
    """The teacher that was named; else, where the recipe distils, the calibrated float model, if it is found."""
    if request.teacher or request.start is None or not recipe.distill.on:
        return request.teacher
    found = original_of(card, [Path(request.start).resolve().parent], request.original)
    if found is None and not card.has_own_weights:
        found = Path(request.start)
    if found is None:
        return None
    log.info("teacher: %s, the float model that was calibrated (‹teacher› names another)", found)
    return str(found)


def run(options: FinetuneOptions, world: World) -> None:
    checkpoint, cfg = _start(options)
    finetune_and_show(options, checkpoint, cfg, shared.output_dir(options.output, cfg), world)


def _start(options: FinetuneOptions) -> tuple[OpenedCheckpoint | None, CfgNode]:
    checkpoint = shared.opened(options.checkpoint)
    return checkpoint, shared.config_of(checkpoint, options.model, options.data, options.run, OUTPUT=options.output)


def finetune_and_show(
    options: FinetuneOptions, checkpoint: Checkpoint | None, cfg: CfgNode, folder: Path, world: World
) -> Finetuned:
    """Fine-tune in `folder` as options say, score, and print the results."""
    policy = options.policy.one()
    tuned = finetune_and_score(options, checkpoint, cfg, folder, world, [policy] if policy else [])
    scored = tuned.evaluation
    if world.is_main and scored.outputs:
        print(scored)
    elif world.is_main and scored.results:
        show_cards([scored.card], options.json, [scored.verdict] if scored.verdict else [])
    return tuned


def finetune_and_score(
    options: FinetuneOptions,
    checkpoint: Checkpoint | None,
    cfg: CfgNode,
    folder: Path,
    world: World,
    policies: Sequence[Policy],
    changes: Mapping[str, Any] | None = None,
) -> Finetuned:
    """Fine-tune, then score on val where there is one; the results go into the run card."""
    from swin_quant.checkpoint.identify import config_given
    from swin_quant.data.sources import has_split
    from swin_quant.model import Model
    from swin_quant.quant.policy import policy_from_dict
    from swin_quant.report.verdict import of_training
    from swin_quant.score.baseline import find_baseline
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.run import plot
    from swin_quant.verbs.evaluate import Evaluation, score_model, scored_on

    data, training, qat = options.data, options.training, options.qat
    recipe = load_recipe(training.recipe or DEFAULT_RECIPE).having(changes or {}, "changes")
    recipe = qat.change(recipe, training, data.batch)
    request = replace(
        training.request(folder, checkpoint, data, options.replace_head),
        teacher=qat.teacher,
        teacher_cfg=config_given(qat.teacher_cfg, qat.teacher) if qat.teacher_cfg else None,
        original=options.original,
    )
    with only_writer(request.folder, world):  # until the last result is in the run card
        trained = train_quantized(cfg, recipe, request, policies, world)
        file, card, policy = trained.checkpoint, trained.card, policy_from_dict(trained.card.policy, "run card")
        shared.tell_bits([policy])
        has_logits = cfg.MODEL.OUTPUT_KIND == LOGITS
        if options.no_eval or (
            trained.position.best_epoch is None if has_logits else world.size > 1 or not has_split(cfg, "val")
        ):
            return Finetuned(file, Evaluation((), card))
        baseline = find_baseline(card, [file.resolve().parent], cfg, [policy], world, request.original)
        model = Model(trained.model, card=card)
        pictures = scored_on(cfg, model, max_unreadable=request.max_unreadable)
        scored = score_model(model, pictures, [policy], world, data.half, baseline)
        if not has_logits:
            return Finetuned(file, scored)
        if world.is_main:
            model.card.write(file.with_suffix(".json"))
            plot(request, cfg.MODEL.NAME, scored.results)
    return Finetuned(file, replace(scored, verdict=of_training(model.card, file)))
