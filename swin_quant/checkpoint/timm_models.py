"""Checkpoints of any other model of timm: which it is, by the hub's name of the file or by what lies beside it."""

from collections.abc import Mapping
from typing import Any

from yacs.config import CfgNode

from swin_quant.checkpoint.geometry import geometry
from swin_quant.checkpoint.published import described_by_timm, published
from swin_quant.checkpoint.sources import timm_name
from swin_quant.checkpoint.weights import Weights
from swin_quant.config import load_config
from swin_quant.config.timm import HEADS


def timm_config_name(weights: Weights) -> str | None:
    """`timm:NAME` of weights that are no Swin's, and whose repository says what they are; else None."""
    file = weights.source.path
    if geometry(weights.state):
        return None
    if (name := timm_name(file)) is not None:
        return f"timm:{name}"
    name = described_by_timm(weights.source).get("architecture")
    return f"timm:{name}" if isinstance(name, str) else None


def of_timm(named: str, weights: Weights, overrides: Mapping[str, Any]) -> CfgNode:
    """The config of `named`, with what its publisher and its head say, under `overrides`; errors of `load_config`."""
    said = dict(published(weights.source, {"TYPE": "timm"}, overrides.keys()).keys)
    if (classes := _classes(weights)) is not None:
        said["MODEL.NUM_CLASSES"] = classes
    return load_config(named, overrides={**said, **overrides})


def _classes(weights: Weights) -> int | None:
    heads = (weights.state.get(f"{head}.weight") for head in HEADS)
    return next((len(head) for head in heads if head is not None and head.dim() > 1), None)
