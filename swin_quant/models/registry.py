"""Architectures by name, built in or from installed packages: how to build each, and the roles of its parts.

Parts are named by patterns over module names: a star stands for one word between dots. `layers.*.blocks.*` are the
blocks of every stage of Swin.
"""

import importlib
from dataclasses import replace
from functools import cache

from torch import nn
from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import announced
from swin_quant.config.defaults import ENTRY_POINTS, register_family
from swin_quant.config.outputs import EMBEDDING, FEATURES, LOGITS
from swin_quant.models.classifier import Architecture, Classifier
from swin_quant.quant.passes.places import Exchange, found, make_norm_exchange, matched
from swin_quant.quant.passes.units import inside
from swin_quant.quant.quantizer import named_nodes

BUILT_IN = ("swin", "swin_v2", "timm_model")
_registered: dict[str, Architecture] = {}


def architectures() -> dict[str, Architecture]:
    """Every architecture by its name: the built-in ones first."""
    return {**_discovered(), **_registered}


def register(architecture: Architecture) -> Architecture:
    """Add an architecture, for this process. UsageError if another one has its name."""
    if architectures().get(architecture.name, architecture) != architecture:
        raise UsageError(f"architecture {architecture.name!r}: there is one of that name already: choose another")
    register_family(architecture.family)
    _registered[architecture.name] = architecture
    return architecture


def get_architecture(model: nn.Module) -> Architecture:
    """The entry of a model from `build_model`. SwinQuantError for any other model."""
    found = getattr(model, "architecture", None)
    if not isinstance(found, Architecture):
        raise SwinQuantError(f"{type(model).__name__}: is of no registered architecture: build it by build_model")
    return found


def list_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order."""
    return matching(model, get_architecture(model).blocks)


def list_stages(model: nn.Module) -> dict[str, nn.Module]:
    """The stages of a model by name, in order."""
    own = {name: model.get_submodule(name) for name in getattr(model, "own_stages", ())}
    return own or matching(model, get_architecture(model).stages)


def list_exchanges(model: nn.Module) -> list[Exchange]:
    """The places in a model where factors and offsets can move: found by tracing, or its architecture's."""
    every = list(found(_exchanges(model), model))
    if own_units(model) or not _gives_maps(model):
        return every
    padded = list_padded_modules(model)

    def crosses(one: Exchange) -> bool:
        """Whether a layer that sees padding, which has no offset, would have to add an offset back."""
        outside = [part for part in padded if not inside(one.scaled.name, part)]
        return any(inside(layer, part) for part in outside for layer in one.into)

    return [replace(one, offset=None, into=()) if crosses(one) else one for one in every]


def list_padded_modules(model: nn.Module) -> list[str]:
    """The modules that see zeros beside tokens in maps of some sizes; none for a network with its own units."""
    return [] if own_units(model) else list(matching(model, *get_architecture(model).padded))


def list_units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that the forward pass runs one after another, by name, in order."""
    own = {name: model.get_submodule(name) for name in own_units(model)}
    return own or matching(model, *get_architecture(model).units)


def blocks_or_units(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a known architecture, else the units of a captured network, if there are several; else none."""
    if isinstance(getattr(model, "architecture", None), Architecture) and (blocks := list_blocks(model)):
        return blocks
    return {name: model.get_submodule(name) for name in own_units(model) if name}


def own_units(model: nn.Module) -> tuple[str, ...]:
    """The names of the units that a captured network found in itself; none for any other network."""
    return getattr(model, "own_units", ())


def _exchanges(model: nn.Module) -> tuple[Exchange, ...]:
    """The exchanges that a model may have, by patterns; those of a captured network each within one unit."""
    if units := own_units(model):
        own: tuple[Exchange, ...] = getattr(model, "own_exchanges", ())
        names = {one: [part.name for part in (one.scaled, *one.before, *one.after)] for one in own}
        return tuple(one for one in own if any(all(inside(name, unit) for name in names[one]) for unit in units))
    architecture = get_architecture(model)
    pairs = tuple(make_norm_exchange(norm, linears) for norm, linears in architecture.pairs)
    streams = None if _gives_maps(model) else architecture.streams  # maps are the stream itself
    return pairs + architecture.exchanges + (tuple(streams(model)) if streams else ())


def _gives_maps(model: nn.Module) -> bool:
    return bool(getattr(model, "output_kind", LOGITS) == FEATURES)


def matching(model: nn.Module, *patterns: str | None) -> dict[str, nn.Module]:
    """Modules by name that match one of the patterns, in the model's order; None matches nothing."""
    wanted = [pattern for pattern in patterns if pattern is not None]
    return {name: part for name, part in model.named_modules() if any(matched(one, name) is not None for one in wanted)}


@cache
def _discovered() -> dict[str, Architecture]:
    """The ARCHITECTURE of each built-in module, and those of packages; `config.families` warns of equal names."""
    ours = [importlib.import_module(f"swin_quant.models.{name}").ARCHITECTURE for name in BUILT_IN]
    found = {architecture.name: architecture for architecture in ours}
    for _, architecture in announced(ENTRY_POINTS, "Architecture", lambda one: isinstance(one, Architecture)):
        found.setdefault(architecture.name, architecture)
    return found


def build_model(cfg: CfgNode) -> Classifier:
    """The model of a checked `cfg` in evaluation mode, every node off, with the output of MODEL.OUTPUT_KIND.

    UsageError if its architecture has no such output.
    """
    architecture, kind = architectures()[cfg.MODEL.TYPE], cfg.MODEL.OUTPUT_KIND
    if kind == FEATURES or (architecture.pads and not isinstance(cfg.DATA.IMG_SIZE, int)):
        model = _built_by(architecture.backbone, cfg, architecture)
    elif kind == EMBEDDING and architecture.embedding:
        model = _built_by(architecture.embedding, cfg, architecture)
    else:
        model = architecture.build(cfg)
        model.architecture = architecture
    if kind == EMBEDDING and model.output_kind != EMBEDDING:
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
