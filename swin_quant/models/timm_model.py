"""Build any timm image classifier by name, capture it, and give it nodes.

Attention is built from its products (timm's fused attention is off), so that its dropout is kept.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import UsageError, first_line, listed
from swin_quant.config.outputs import EMBEDDING, FEATURES
from swin_quant.config.sides import sides
from swin_quant.config.timm import TIMM, read_builder_options
from swin_quant.models.captured import CapturedNetwork, captured
from swin_quant.models.classifier import Architecture


def _build(cfg: CfgNode) -> CapturedNetwork:
    return _captured(cfg, lambda name, module: module)


def timm_backbone(cfg: CfgNode) -> CapturedNetwork:
    """The maps [B, C, h, w] of a model's stages as timm numbers them, by its `forward_intermediates`.

    Parameters and nodes have the classifier's names, up to the last wanted stage. UsageError if it lacks these stages.
    """
    stages: list[int] = []

    def giving(name: str, module: nn.Module) -> nn.Module:
        if not hasattr(module, "forward_intermediates"):
            raise UsageError(f"MODEL.OUTPUT_KIND {FEATURES}: timm gives no maps of {name}: choose another")
        known = getattr(module, "feature_info", [])
        wanted: Sequence[int] = cfg.MODEL.FEATURES.STAGES or range(len(known))
        if list(wanted) != sorted({*wanted} & {*range(len(known))}) or not wanted:
            there = f"timm's {name} has {len(known)} of them, from 0"
            raise UsageError(f"MODEL.FEATURES.STAGES is {list(wanted)}, and {there}: name some of them, ascending")
        stages.extend(wanted)
        forward: Any = module.forward_intermediates
        module.forward = lambda x: forward(x, indices=stages, intermediates_only=True, stop_early=True)
        return module

    model = _without_logits(_captured(cfg, giving, any_size=True), FEATURES)
    model.output_stages = tuple(stages)
    return model


def timm_embedding(cfg: CfgNode) -> CapturedNetwork:
    """The input of a model's last linear: [B, channels]. UsageError if timm cannot name it."""

    def giving(name: str, module: nn.Module) -> nn.Module:
        if not hasattr(module, "forward_head") or not hasattr(module, "forward_features"):
            raise UsageError(f"MODEL.OUTPUT_KIND {EMBEDDING}: timm gives no embedding of {name}: choose another")
        features: Any = module.forward_features
        head: Any = module.forward_head
        module.forward = lambda x: head(features(x), pre_logits=True)
        return module

    return _without_logits(_captured(cfg, giving), EMBEDDING)


def _without_logits(model: CapturedNetwork, kind: str) -> CapturedNetwork:
    model.output_kind, model.classes = kind, 0
    model.left_out = "|".join(rf"{re.escape(name)}\." for name in model.prune()) or None
    kept = dict(model.named_modules())
    model.own_stages = tuple(name for name in model.own_stages if name in kept)
    return model


def _captured(cfg: CfgNode, giving: Callable[[str, nn.Module], nn.Module], any_size: bool = False) -> CapturedNetwork:
    """timm's model of a config, wrapped by `giving` and captured."""
    timm = import_timm()
    name, options = cfg.MODEL.TIMM.ARCHITECTURE, read_builder_options(cfg, "the configuration")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        raise UsageError(f"MODEL.TIMM.ARCHITECTURE {name}: timm has no such model; it has {listed(close) or 'others'}")
    fused = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)  # attention is two products and a softmax
    try:
        module = giving(name, _made(timm, options, cfg))
    finally:
        timm.layers.set_fused_attn(bool(fused))
    # The modules whose maps timm gives, without those that have no parameters, such as an activation
    modules = dict(module.named_modules())
    places = [str(info.get("module")) for info in getattr(module, "feature_info", None) or ()]
    stages = tuple(name for name in places if name in modules and any(True for _ in modules[name].parameters()))
    size, stem = sides(cfg.DATA.IMG_SIZE), cfg.MODEL.TIMM.QUANTIZE_STEM
    model = captured(module, (3, *size), cfg.MODEL.NUM_CLASSES, what=name, stem=stem, any_size=any_size)
    model.own_stages = stages
    model.convert_names = partial(_convert_names, cfg)
    return model


def _convert_names(cfg: CfgNode, state: Mapping[str, Any]) -> dict[str, Any]:
    """A publisher's weights under the names of timm's model, by timm's own function; unchanged where it has none."""
    module = _without_values(cfg)
    convert = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    try:
        return dict(convert(dict(state), module)) if convert else dict(state)
    except Exception:  # it expects the files of its own publishers
        return dict(state)


def _without_values(cfg: CfgNode) -> nn.Module:
    """timm's model of a config, of which names and shapes are read."""
    with torch.device("meta"):
        return _made(import_timm(), read_builder_options(cfg, "the configuration"), cfg)


def _one_window(cfg: CfgNode) -> tuple[int, int] | None:
    """The channels of a head and the tokens of a picture of a ViT, unless rotations differ by head, or a norm stands
    behind its products."""
    name, models = cfg.MODEL.TIMM.ARCHITECTURE, import_timm().models
    if not import_timm().is_model(name):
        return None
    module: Any = _without_values(cfg)
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "qkv")]
    plain, rotated = models.vision_transformer.Attention, (models.eva.AttentionRope, models.eva.EvaAttention)
    known = {plain, models.beit.Attention, *rotated}
    if not parts or {type(part) for part in parts} - known or getattr(module, "rope_mixed", False):
        return None
    if any(not isinstance(getattr(part, "norm", nn.Identity()), nn.Identity) for part in parts):
        return None
    channels = parts[0].proj.in_features // parts[0].num_heads
    return channels, module.patch_embed.num_patches + module.num_prefix_tokens


def _made(timm: Any, options: Mapping[str, Any], cfg: CfgNode) -> nn.Module:
    """timm's model, for the config's size of pictures if its builder takes one. UsageError if timm refuses."""
    name, (height, width) = cfg.MODEL.TIMM.ARCHITECTURE, sides(cfg.DATA.IMG_SIZE)
    options = {**options, "num_classes": cfg.MODEL.NUM_CLASSES}
    size = height if height == width else (height, width)
    rates = {"drop_rate": cfg.MODEL.DROP_RATE, "drop_path_rate": cfg.MODEL.DROP_PATH_RATE}
    problem: Exception | None = None
    for more in ({"img_size": size, **rates}, rates, {"drop_rate": cfg.MODEL.DROP_RATE}, {}):
        try:
            return timm.create_model(name, **{**more, **options})
        except TypeError as error:  # an unknown option, or a wrong value
            problem = error
            if not any(f"'{key}'" in str(error) for key in more if key not in options):
                break
        except Exception as error:  # the builders may raise anything
            problem = error
            break
    reason = first_line(problem)
    raise UsageError(f"{name}: timm refuses MODEL.TIMM.OPTIONS {cfg.MODEL.TIMM.OPTIONS or '{}'}: {reason}") from problem


ARCHITECTURE = Architecture(
    TIMM,
    _build,
    no_decay=("pos_embed", "cls_token", "dist_token", "relative_position_bias"),
    backbone="swin_quant.models.timm_model:timm_backbone",
    embedding="swin_quant.models.timm_model:timm_embedding",
    one_window=_one_window,
)
