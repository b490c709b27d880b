"""QAT start to end: a calibrated checkpoint in, a trained one that is calibrated as well out, and its run card."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.cards import dependents
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import original_of
from swin_quant.cards.records import RangesRecord
from swin_quant.cards.versions import versions
from swin_quant.config.outputs import LOGITS
from swin_quant.loading import load_for_scoring
from swin_quant.quant.policy import Policy, enabled_nodes, quantize
from swin_quant.saving import save_with_card
from swin_quant.tasks.train import Request, Trained, refuse_to_replace, run, training_config, with_batch_size
from swin_quant.train.amax import settle_granularity
from swin_quant.train.outdir import only_writer
from swin_quant.train.recipe import Recipe
from swin_quant.verbs.evaluate import compared

# Maps and embeddings have no labels: they are learned from the float model's.
_OF_FEATURES = {"distill.weight": 0.0, "distill.features": 1.0, "augment.mixup": 0.0, "augment.cutmix": 0.0}


def finetune(
    cfg: CfgNode,
    recipe: Recipe,
    request: Request,
    policies: Sequence[Policy],
    world: World = World(),  # noqa: B008
) -> Trained:
    """QAT of the calibrated checkpoint `request.start` under a policy (else its run card's); writes <NAME>_qat.pth.

    A model of maps or an embedding needs no labels: it learns to give what the float one gives.
    The result is calibrated as well, in the same formats, and no weight of it lies outside its range.
    """
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
        origin, _ = compared(subject, cfg, world, request.original) if request.original else (subject.card, None)
        model, policy = subject.model, subject.policies[0]
        if not enabled_nodes(model):
            raise UsageError(f"policy {policy.name} quantizes nothing: choose another, or `swin-quant train` for float")
        quantize(model)
        # Snapshots are compared with the model, and have the ranges that training gives it.
        settle_granularity(model, enabled_nodes(model))
        request = replace(request, teacher=_teacher(request, recipe, subject.card))
        model, position, record, named = run(model, cfg, recipe, request, world, origin.class_names, policy)
        if subject.card.training and "ranges" in subject.card.training:  # one learned before was not calibrated
            now, before = record["ranges"], subject.card.training["ranges"]
            record["ranges"] = RangesRecord(
                weights=now["weights"] or before["weights"], activations=now["activations"] or before["activations"]
            )
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
    if request.teacher or request.start is None or not recipe.distill.on:
        return request.teacher
    found = original_of(card, [Path(request.start).resolve().parent], request.original)
    if found is None and not card.has_own_weights:
        found = Path(request.start)
    if found is None:
        return None
    log.info("teacher: %s, the float model that was calibrated (‹teacher› names another)", found)
    return str(found)
