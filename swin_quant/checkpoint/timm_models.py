"""Checkpoints of any other model of timm: which it is, by the hub's name of the file or by what lies beside it."""

import json
from collections.abc import Mapping
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.files import read_json
from swin_quant.checkpoint.geometry import geometry
from swin_quant.checkpoint.hub import WEIGHTS
from swin_quant.checkpoint.published import published
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
    name = _beside(weights).get("architecture")
    return f"timm:{name}" if isinstance(name, str) else None


def of_timm(named: str, weights: Weights, overrides: Mapping[str, Any]) -> CfgNode:
    """The config of `named`, with what its publisher and its head say, under `overrides`; errors of `load_config`."""
    options = _beside(weights).get("model_args")
    said = dict(published(weights.source, {"TYPE": "timm"}, overrides.keys()).keys)
    if isinstance(options, dict) and options:
        said["MODEL.TIMM.OPTIONS"] = json.dumps({key: value for key, value in options.items() if key != "img_size"})
    if (classes := _classes(weights)) is not None:
        said["MODEL.NUM_CLASSES"] = classes
    return load_config(named, overrides={**said, **overrides})


def _beside(weights: Weights) -> dict[str, Any]:
    file = weights.source.path.with_name("config.json")
    if weights.source.path.name not in WEIGHTS or not file.is_file():
        return {}
    found = read_json(file, "description of a checkpoint")
    return found if isinstance(found, dict) else {}


def _classes(weights: Weights) -> int | None:
    heads = (weights.state.get(f"{head}.weight") for head in HEADS)
    return next((len(head) for head in heads if head is not None and head.dim() > 1), None)
