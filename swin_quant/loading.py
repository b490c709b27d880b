"""Load a model: from a checkpoint of any kind, with the run card beside it, its policies, and its float baseline."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.arguments import checked
from swin_quant.base.arguments import Parameter
from swin_quant.base.distributed import World, this_world
from swin_quant.base.errors import SwinQuantError, UsageError, called
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CheckpointRecord, SourceRecord
from swin_quant.checkpoint import load_calibrated, load_float, open_checkpoint
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.checkpoint.opened import Checkpoint, OpenedCheckpoint, made_before
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.config import architecture, from_dict, to_dict
from swin_quant.config.load import keys_and_values, leaves, portable_config
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.preprocess import Preprocess
from swin_quant.model import Model
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import Policy, apply_policy, load_policy, policy_from_dict, settings_for
from swin_quant.score.baseline import Baseline, find_baseline, load_original, missing, unnamed_baseline, whose_weights
from swin_quant.wrapping import wrapped_again


@dataclass(frozen=True)
class ModelFile:
    """A checkpoint, and how it becomes a model where the file does not say it or something else is wanted.

    Args:
        checkpoint: Microsoft's, timm's, Hugging Face's, FasterTransformer's or ours; timm:NAME, hf:NAME
        cfg: YAML, or a shipped name (default: the checkpoint says)
        weights: one of several sets of weights in the file: ema, raw or a name
        img_size: another input size: S, or HEIGHTxWIDTH
        window: another window size
        opts: set keys of the configuration: KEY VALUE ...
        replace_head: take a new head if the number of classes differs
        output_kind: embedding: the input of the head; features: maps of the stages
        device: auto: a GPU if there is one
        random_weights: without a checkpoint: untrained weights, to time them
    """

    checkpoint: str | None = None
    cfg: str | None = None
    weights: str | None = None
    img_size: str | None = None
    window: int | None = None
    opts: tuple[str, ...] = ()
    replace_head: bool = False
    output_kind: Literal["logits", "embedding", "features"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    random_weights: Annotated[bool, Parameter(show=False)] = False

    def config(self, more: Mapping[str, Any] | None = None) -> CfgNode:
        """The config: `cfg`, else the checkpoint's; then `opts`, the other fields, and `more` by dotted key.

        Raises:
            UsageError: Neither `cfg` nor a checkpoint is named, or a value is impossible.
        """
        from swin_quant.checkpoint.identify import config_for, config_given

        opened, words = self.opened, self.img_size.split("x") if self.img_size else []
        if len(words) > 2 or not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
            what = "must be a number of pixels, or height and width as 192x224"
            raise UsageError(f"‹img_size› {self.img_size!r:.40}: {what}")
        sizes = [int(word) for word in words]
        size = sizes if len(sizes) == 2 else sizes[0] if sizes else None
        wanted = _by_key(self.output_kind, self.weights, size, self.window) | dict(more or {})
        if self.cfg:
            cfg = config_given(self.cfg, opened, self.opts, wanted)
        elif opened:
            # A card's values name no folder of this machine.
            elsewhere = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}
            cfg = config_for(opened, elsewhere | keys_and_values(self.opts) | wanted)
        else:
            raise UsageError("no model: give a CHECKPOINT, or ‹cfg› FILE")
        if opened:
            cfg.defrost()
            cfg.MODEL.RESUME = str(opened)
            cfg.freeze()
        if self.window and "WINDOW_SIZE" not in architecture(cfg):
            raise UsageError(f"‹window› {self.window}: {cfg.MODEL.NAME} is no Swin, and has no windows of one size")
        if not 0 <= cfg.SEED < 2**32:
            raise UsageError(f"SEED (‹seed›) {cfg.SEED}: must be from 0 to {2**32 - 1}")
        return cfg

    @cached_property
    def opened(self) -> OpenedCheckpoint | None:
        """The checkpoint, opened once; None where none is named."""
        return open_checkpoint(self.checkpoint) if self.checkpoint else None

    def need_checkpoint(self) -> OpenedCheckpoint:
        """The opened checkpoint. UsageError where none is named."""
        if self.opened is None:
            raise UsageError("no checkpoint: name one")
        return self.opened

    def load(self, policies: Sequence[Policy] = (), any_bits: bool = False) -> Model:
        """The model, calibrated if the file is: under `policies`, else its run card's. `any_bits`: policies may have
        other bits than the ranges were found for."""
        checkpoint = self.need_checkpoint()
        if checkpoint.file.suffix == ".onnx" or (checkpoint.card and checkpoint.card.artifact):
            raise UsageError(f"{checkpoint}: is an artifact, and this needs the checkpoint that it was made from")
        cfg = self.config()
        model, _ = load_for_scoring(cfg, checkpoint, policies, this_world(), self.replace_head, any_bits)
        if self.output_kind:
            model.card = giving(model.card, cfg)
        model.given = cfg
        return model

    def load_float(self) -> Model:
        """The model in float, also of a calibrated file: its ranges are left out. Without a checkpoint its weights are
        random; else its card names their original, their training and their earlier passes."""
        if not self.checkpoint and not self.random_weights:
            raise UsageError("no checkpoint: name one (or ‹random_weights› to time an untrained model)")
        cfg, checkpoint = self.config(), self.opened
        torch.manual_seed(cfg.SEED)
        module = build_model(cfg)
        source = load_float(module, checkpoint, replace_head=self.replace_head).record() if checkpoint else None
        before = made_before(checkpoint)
        if checkpoint is None:
            log.warning("no checkpoint: these are random weights, good for timing only")
        refuse_changed_features(str(checkpoint), before, cfg)
        card = _card(
            cfg,
            # That of the earlier work in the checkpoint, else the file that was read.
            before.source if before and (before.source or before.has_own_weights) else source,
            training=before.training if before else None,
            calibration=before.calibration if before else None,
            class_names=read_class_names(cfg, checkpoint, self.replace_head),
        )
        if checkpoint:
            checkpoint.forget()
        model = Model(module.to(this_world().device), card=card)
        model.given = cfg
        return model


def _by_key(output_kind: str | None, weights: str | None, img_size: Any, window: int | None) -> dict[str, Any]:
    """What is asked for, by the keys of the configuration."""
    asked = {"MODEL.OUTPUT_KIND": output_kind or None, "MODEL.WEIGHTS": weights, "DATA.IMG_SIZE": img_size}
    asked |= dict.fromkeys(("MODEL.SWIN.WINDOW_SIZE", "MODEL.SWINV2.WINDOW_SIZE"), window)
    return {key: value for key, value in asked.items() if value is not None}


@checked
def load(
    checkpoint: str | Path,
    config: str | Path | CfgNode | nn.Module | None = None,
    policy: str | Policy | None = None,
    *,
    device: str = "cpu",
    replace_head: bool = False,
    output_kind: str | None = None,
    weights: str | None = None,
    img_size: int | Sequence[int] | None = None,
    window: int | None = None,
    **features: Any,
) -> Model:
    """The model in a checkpoint of ours, Microsoft's, timm's, Hugging Face's or FasterTransformer's, or `timm:NAME`.

    Its run card tells the architecture, else its keys and shapes, else `config`: a YAML file, the name of a shipped
    one, or, for a wrapped network, a module with its structure. `policy` is for a calibrated checkpoint without run
    card. `output_kind` "features" makes it a backbone, which takes pictures of any size and gives the maps of its
    stages ("embedding": the head's input); then `features` are stages=[...], norm="each", windows="detection", as in
    docs/backbones.md. `weights` chooses among the sets of a file that holds several: ema, raw, or a name. `img_size`
    (a side, or height and width) and `window` give a float model another size, with its positions interpolated.
    SwinQuantError for a file that is no Swin, is damaged, or fits no config or several (they are named).
    """
    wanted = _by_key(output_kind, weights, img_size, window)
    wanted |= {f"MODEL.FEATURES.{key.upper()}": value for key, value in features.items()}
    if not isinstance(checkpoint, str | os.PathLike):
        what = "torch.save a state dict and give its name, or sq.wrap(module, SIZE)"
        raise UsageError(f"{type(checkpoint).__name__}: is no file: {what}")
    opened = open_checkpoint(checkpoint)
    if opened.file.suffix == ".onnx" or (opened.card and opened.card.artifact):
        raise UsageError(f"{checkpoint}: is an artifact: sq.artifact(FILE)")
    if isinstance(config, nn.Module):
        return wrapped_again(opened, config, device)
    if not isinstance(config, str | Path | CfgNode | None):
        given = type(config).__name__
        raise UsageError(f"{given}: is no config: give a module, sq.load(FILE, module), a YAML file or a shipped name")
    from swin_quant.checkpoint.identify import agreed, config_for, config_given

    with called(cfg="config"):
        if config is None:
            cfg = config_for(opened, wanted)
        elif isinstance(config, CfgNode):
            cfg = from_dict(to_dict(config), "load", wanted) if wanted else config
            cfg = agreed(cfg, opened, {key for key, _ in leaves(to_dict(cfg))}, wanted.keys())
        else:
            cfg = config_given(config, opened, (), wanted)
    chosen = [load_policy(policy)] if policy else []
    world = World(device=torch.device(device))
    model, _ = load_for_scoring(cfg, opened, chosen, world, replace_head)
    if wanted:
        model.card = giving(model.card, cfg)
    model.given = cfg
    return model


def load_for_scoring(
    cfg: CfgNode,
    checkpoint: Checkpoint,
    policies: Sequence[Policy] = (),
    world: World = World(),
    replace_head: bool = False,
    any_bits: bool = False,
) -> tuple[Model, list[Policy]]:
    """Load `checkpoint` and settle the policies for scoring: the given ones, else its run card's.

    A float checkpoint is scored only in float, and refused if a policy needs more; a calibrated one without run card
    needs a policy. A run card beside the checkpoint must be that checkpoint's. A policy with other bits than the ranges
    were found for is refused if they depend on them, unless the caller will find new ones (`any_bits`).
    """
    checkpoint = open_checkpoint(checkpoint)
    card = checkpoint.card
    refuse_changed_features(str(checkpoint), card, cfg)
    policies = list(policies)
    if not policies and card and card.policy:
        policies = [policy_from_dict(card.policy, str(card_path(checkpoint)))]
    torch.manual_seed(cfg.SEED)
    module = build_model(cfg)
    quantized = [policy for policy in policies if any(s.enabled for s in settings_for(module, policy).values())]
    if quantized:
        if not any_bits:
            check_bits(module, card, quantized, str(checkpoint))
        apply_policy(module, quantized[0])
        source = load_calibrated(module, checkpoint)
    else:
        source = load_float(module, checkpoint, replace_head=replace_head)
        if not policies and source.calibrated:
            raise UsageError(f"{checkpoint}: is calibrated but has no run card: choose a ‹policy›")
    names = [] if card else read_class_names(cfg, checkpoint, replace_head)
    checkpoint.forget()
    if card is None:
        card = _card(cfg, source.record(), policy=policies[0].to_dict() if policies else None, class_names=names)
    return Model(module.to(world.device), card=card, file=checkpoint.file), policies


def _card(cfg: CfgNode, source: SourceRecord | None, **known: Any) -> RunCard:
    """The run card of a model of `cfg` with weights from `source`."""
    return RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict(), source, **known)


def giving(card: RunCard, cfg: CfgNode) -> RunCard:
    """The card, with a config whose outputs are `cfg`'s: maps of a model that was calibrated as a classifier."""
    if cfg.MODEL.OUTPUT_KIND == LOGITS:
        return card
    model = {key: portable_config(cfg)["MODEL"][key] for key in ("OUTPUT_KIND", "FEATURES")}
    return replace(card, config={**card.config, "MODEL": {**card.config["MODEL"], **model}})


def refuse_changed_features(checkpoint: str, card: RunCard | None, cfg: CfgNode) -> None:
    """SwinQuantError if maps are wanted of a checkpoint whose maps differ from its original's."""
    if card and card.changes_features and cfg.MODEL.OUTPUT_KIND == FEATURES:
        raise SwinQuantError(
            f"{checkpoint}: `equalize` changed values that features show and logits do not (a residual stream, or a "
            "norm beside padding): calibrate the float checkpoint with ‹output_kind› features"
        )


def model_or_shapes(cfg: CfgNode, checkpoint: Checkpoint | None = None, policy: Policy | None = None) -> Classifier:
    """The model that `cfg` describes, float or calibrated as in its checkpoint; without a checkpoint, only shapes."""
    with torch.device("cpu" if checkpoint else "meta"):  # shapes and names need no weights
        model = build_model(cfg)
    subject = open_checkpoint(checkpoint) if checkpoint else None
    card = subject.card if subject else None
    if card and card.policy and policy is None:
        policy = policy_from_dict(card.policy, card.name)
    if policy is not None:
        apply_policy(model, policy)
    if subject:
        (load_calibrated if subject.is_calibrated else load_float)(model, subject)
        subject.forget()
    return model


def open_baseline(
    model: Model,
    policies: Sequence[Policy],
    world: World = World(),
    original: str | Path | None = None,
    cfg: CfgNode | None = None,
) -> Baseline | None:
    """The baseline of a model; None where it is its own. `cfg` None: the run card's.

    `original`: the float checkpoint that its weights came from, which is looked for by the run card if it is not named.
    A calibrated checkpoint without run card came from `original`, which the model's card then names: if their weights
    differ, it was trained since.
    """
    card = model.card
    if original and not policies and not model.is_calibrated:
        raise UsageError(f"‹float› {original}: the scored file is a float checkpoint itself: leave ‹float› out")
    if model.file and not model.card_file:
        if original is None:
            if policies:
                log.info("no run card: its weights are taken for the float model's; after QAT give ‹float› FILE")
            return None
        float_model, source = load_original(cfg or model.config, original, world)
        given = model.card.source
        kept = CheckpointRecord.__annotations__.keys()
        own: Any = {key: value for key, value in given.items() if key in kept} if given else None
        model.card = replace(model.card, source=source.record(), checkpoint=own)
        weights, ours = dict(float_model.named_parameters()), dict(model.module.named_parameters())
        same = ours.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in ours.items())
        return None if same else Baseline(float_model)
    if original is None and model.original is not None:
        return Baseline(model.original, whose=whose_weights(card))
    if original is None and not card.has_own_weights:
        return None
    if original is None and not card.config:
        log.warning("%s", missing(card))
        return unnamed_baseline(card)
    folders = [model.file.resolve().parent] if model.file else []
    return find_baseline(card, folders, cfg or model.config, policies, world, str(original) if original else None)
