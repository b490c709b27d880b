"""Build the model of a config, with freshly initialised weights and named nodes."""

import importlib
from dataclasses import replace

from torch import nn
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import EMBEDDING, FEATURES
from swin_quant.models.classifier import Architecture, Classifier
from swin_quant.models.registry import architectures
from swin_quant.quant.quantizer import named_nodes


def build_model(cfg: CfgNode) -> Classifier:
    """The model of a checked `cfg` in evaluation mode, every node off, with the output of MODEL.OUTPUT_KIND.

    UsageError if its architecture has no such output.
    """
    architecture = architectures()[cfg.MODEL.TYPE]
    if cfg.MODEL.OUTPUT_KIND == FEATURES:
        model = _built_by(architecture.backbone, cfg, architecture)
    elif architecture.pads and not isinstance(cfg.DATA.IMG_SIZE, int):
        model = _built_by(architecture.backbone, cfg, architecture)
        if cfg.MODEL.OUTPUT_KIND == EMBEDDING:
            _take_head_off(model, architecture)
    elif cfg.MODEL.OUTPUT_KIND == EMBEDDING and architecture.embedding:
        model = _built_by(architecture.embedding, cfg, architecture)
    else:
        model = architecture.build(cfg)
        model.architecture = architecture
        if cfg.MODEL.OUTPUT_KIND == EMBEDDING:
            _take_head_off(model, architecture)
    model.weights_set = cfg.MODEL.WEIGHTS
    named_nodes(model)
    return model.eval()


def _built_by(function: str | None, cfg: CfgNode, architecture: Architecture) -> Classifier:
    if function is None:
        raise UsageError(f"MODEL.OUTPUT_KIND {FEATURES}: {architecture.name} has no backbone: choose another")
    module, _, name = function.partition(":")
    model: Classifier = getattr(importlib.import_module(module), name)(cfg)
    model.architecture = replace(architecture, rewrites=getattr(model, "rewrites", None))
    return model


def _take_head_off(model: Classifier, architecture: Architecture) -> None:
    """Make the head's input the output: [B, channels]."""
    if set(architecture.family.head) != {"head.weight", "head.bias"}:
        raise UsageError(f"MODEL.OUTPUT_KIND {EMBEDDING}: the head of {architecture.name} is not called `head`")
    model.add_module("head", nn.Identity())
    model.output_kind, model.classes = EMBEDDING, 0
    model.left_out = "|".join(filter(None, (r"head\.", model.left_out)))
