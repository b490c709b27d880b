"""QAT: fine-tune a calibrated checkpoint with its nodes on; the result is calibrated as well, and is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.base.errors import UsageError
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Group, Rare
from swin_quant.cli.output import show
from swin_quant.verbs.train import TrainingOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard
    from swin_quant.checkpoint.opened import Checkpoint
    from swin_quant.quant.policy import Policy
    from swin_quant.train.recipe import Recipe
    from swin_quant.train.run import Request, Trained

HELP = "QAT: fine-tune a calibrated checkpoint with its nodes on: writes <NAME>_qat.pth, its run card, logs; scores it."
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
    """Options of QAT beside those of training: a teacher, and the mode of ranges."""

    distill: Annotated[bool, Flag("learn from a teacher (distill.weight 1 if it is 0)")] = False
    teacher: Annotated[
        str | None, Flag("float checkpoint of the same classes to learn from (default: the original)", "FILE")
    ] = None
    teacher_cfg: Annotated[str | None, Rare("its configuration, if it is another model", "FILE")] = None
    distill_weight: Annotated[float | None, Rare("distill.weight", "W")] = None
    temperature: Annotated[float | None, Rare("distill.temperature", "T")] = None
    distill_compat: Annotated[Literal["none", "ft"] | None, Rare("ft: FasterTransformer's loss, to the letter")] = None
    amax: Annotated[Literal["frozen", "learned", "reestimated"] | None, Flag("amax.mode: what ranges do")] = None

    def change(self, recipe: Recipe, training: TrainingOptions, batch: int | None) -> Recipe:
        """`recipe` as `training` changes it, and what --distill and --teacher mean for it."""
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

    checkpoint: Annotated[str | None, Flag("calibrated checkpoint", "CHECKPOINT", or_flag=True)] = None
    model: Annotated[shared.ModelOptions, Group("model")] = field(default_factory=shared.ModelOptions)
    replace_head: shared.ReplaceHead = False
    data: Annotated[shared.ScoringOptions, Group("pictures")] = field(default_factory=shared.ScoringOptions)
    policy: Annotated[shared.PolicyOptions, Group("policy: which nodes are quantized, and how")] = field(
        default_factory=shared.PolicyOptions
    )
    training: Annotated[TrainingOptions, Group("training")] = field(default_factory=TrainingOptions)
    no_eval: shared.NoEval = False
    qat: Annotated[QatOptions, Group("QAT")] = field(default_factory=QatOptions)
    original: shared.Original = None
    run: Annotated[shared.RunOptions, Group("run")] = field(default_factory=shared.RunOptions)
    output: shared.Output = None
    json: shared.Json = None


OPTIONS = FinetuneOptions


def finetune(cfg: CfgNode, recipe: Recipe, request: Request, policies: Sequence[Policy], world: World) -> Trained:
    """QAT of the calibrated checkpoint `request.start` under a policy (else its run card's); writes <NAME>_qat.pth.

    A model of maps or an embedding needs no labels: it learns to give what the float one gives.
    The result is calibrated as well, in the same formats, and no weight of it lies outside its range.
    """
    from swin_quant.cards import dependents
    from swin_quant.cards.versions import versions
    from swin_quant.config.outputs import LOGITS
    from swin_quant.loading import load_for_scoring
    from swin_quant.quant.policy import enabled_nodes, quantize
    from swin_quant.saving import save_with_card
    from swin_quant.train.amax import settle_granularity
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.run import Trained, refuse_to_replace, run_training, training_config, with_batch_size
    from swin_quant.verbs.baselines import card_and_baseline

    with only_writer(request.folder, world):
        recipe = with_batch_size(recipe, cfg)
        if cfg.MODEL.OUTPUT_KIND != LOGITS:
            recipe = recipe.having(_OF_FEATURES, "a backbone")
        if not request.start:
            raise UsageError("no checkpoint: give the calibrated one (with ‹continue›, too)")
        path = request.folder / f"{cfg.MODEL.NAME}_qat.pth"
        refuse_to_replace(path, request)
        if not request.resume:
            dependents.refuse_to_replace(path)
        found_anew = recipe.amax.initial == "reestimated" and recipe.amax.weights and recipe.amax.activations
        subject = load_for_scoring(training_config(cfg, recipe), request.start, policies, world, any_bits=found_anew)
        if len(subject.policies) != 1:
            raise UsageError(
                f"{request.start}: is not calibrated: run `swin-quant calibrate` first, QAT starts from there"
            )
        origin, _ = (
            card_and_baseline(subject, cfg, world, request.original) if request.original else (subject.card, None)
        )
        model, policy = subject.model, subject.policies[0]
        if not enabled_nodes(model):
            raise UsageError(f"policy {policy.name} quantizes nothing: choose another, or `swin-quant train` for float")
        quantize(model)
        # Snapshots are compared with the model, and have the ranges that training gives it.
        settle_granularity(model, enabled_nodes(model))
        request = replace(request, teacher=_teacher(request, recipe, subject.card))
        model, position, record, named = run_training(model, cfg, recipe, request, world, origin.class_names, policy)
        if subject.card.training and "ranges" in subject.card.training:  # one learned before was not calibrated
            now, before = record["ranges"], subject.card.training["ranges"]
            kinds: tuple[Literal["weights", "activations"], ...] = ("weights", "activations")
            record["ranges"] = {kind: now[kind] or before[kind] for kind in kinds}  # type: ignore[typeddict-item]
        card = replace(
            origin,
            policy=policy.to_dict(),
            training=record,
            class_names=named,
            results=[],  # and the rest that was measured of other weights
            verification=[],
            sensitivity=None,
            searches=[],
            versions=versions(),
        )
        if world.is_main:
            card = save_with_card(model, path, card, by_channel=True)
        return Trained(model, path, card, position)


def _teacher(request: Request, recipe: Recipe, card: RunCard) -> str | None:
    """Who is asked for; else, where the recipe distils, the float model that was calibrated, if it is found."""
    from swin_quant.base.progress import log
    from swin_quant.cards.lineage import original_of

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
    checkpoint = shared.opened(options.checkpoint)
    cfg = shared.config_of(checkpoint, options.model, options.data, options.run, OUTPUT=options.output)
    finetune_and_score(options, checkpoint, cfg, shared.output_dir(options.output, cfg), world)


def finetune_and_score(
    options: FinetuneOptions, checkpoint: Checkpoint | None, cfg: CfgNode, folder: Path, world: World
) -> RunCard | None:
    """Fine-tune in `folder`, then score; returns the card of what was scored, None if nothing was."""
    from swin_quant.checkpoint.identify import config_given
    from swin_quant.config.outputs import LOGITS
    from swin_quant.quant.policy import policy_from_dict
    from swin_quant.report.verdict import of_training
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.scoring import score_model
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.recipe import load_recipe
    from swin_quant.train.run import plot

    data, training, qat = options.data, options.training, options.qat
    recipe = qat.change(load_recipe(training.recipe or DEFAULT_RECIPE), training, data.batch)
    policies = options.policy.policies()
    if len(policies) > 1:
        raise UsageError("--policy: fine-tuning is for one policy at a time")
    with only_writer(folder, world):  # until the last result is in the run card
        request = replace(
            training.request(folder, checkpoint, data, options.replace_head),
            teacher=qat.teacher,
            teacher_cfg=config_given(qat.teacher_cfg, qat.teacher) if qat.teacher_cfg else None,
            original=options.original,
        )
        trained = finetune(cfg, recipe, request, policies, world)
        policy = policy_from_dict(trained.card.policy, "run card")
        shared.tell_bits([policy])
        if cfg.MODEL.OUTPUT_KIND != LOGITS:
            _print_features(options, cfg, trained, policy, world)
            return None
        if options.no_eval or trained.position.best_epoch is None:
            return None
        baseline = find_baseline(
            trained.card, [trained.checkpoint.resolve().parent], cfg, [policy], world, options.original
        )
        scored = (trained.card, [policy], world, "val", data.half, data.max_unreadable, baseline)
        card = score_model(trained.model, cfg, *scored)
        if world.is_main:
            card.write(trained.checkpoint.with_suffix(".json"))
            plot(request, cfg.MODEL.NAME, card.measured())
            found = of_training(card, trained.checkpoint, _target_for(policy))
            show([card], options.json, [found] if found else [])
    return card


def _target_for(policy: Policy) -> str:
    """The backend to export for: one that takes the policy and whose engine is here, if there is one."""
    from swin_quant.backends.registry import targets

    able = [one for one in targets().values() if policy.name in one.exporting.policies] or list(targets().values())
    return max(able, key=lambda one: one.runs_its_export and one.is_installed and not one.emulates).name


def _print_features(options: FinetuneOptions, cfg: CfgNode, trained: Trained, policy: Policy, world: World) -> None:
    from swin_quant.data.sources import has_split
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.features import score_features

    if options.no_eval or world.size > 1 or not has_split(cfg, "val"):
        return
    folders = [trained.checkpoint.resolve().parent]
    baseline = find_baseline(trained.card, folders, cfg, [policy], world, options.original)
    how = (world, "val", options.data.half, options.data.max_unreadable, baseline)
    for score in score_features(trained.model, cfg, trained.card, [policy], *how):
        print(score)
