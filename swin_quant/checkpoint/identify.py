"""The configuration of a checkpoint that came without one: from its run card, or from its own keys and shapes.

What they leave open (the size of the pictures where no mask is stored, crop and interpolation always) is taken from the
shipped configuration of the same geometry. Where several fit that mean different models, the user has to say which.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.lineage import card_of
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.candidates import Candidate, choose, fitting, nearest
from swin_quant.checkpoint.footprint import check_footprint
from swin_quant.checkpoint.geometry import Geometry, difference, geometry, stage_windows
from swin_quant.checkpoint.sources import local_file, name_of
from swin_quant.checkpoint.weights import Checkpoint, Weights, read_weights
from swin_quant.config import default_config, from_dict, load_config
from swin_quant.config.values import merge

_ELSEWHERE = {"TYPE": "MODEL.TYPE", "NUM_CLASSES": "MODEL.NUM_CLASSES", "IMG_SIZE": "DATA.IMG_SIZE"}
_OPEN = ("IMG_SIZE", "WINDOW_SIZE", "PRETRAINED_WINDOW_SIZES")  # what some files do not tell, and the user may
_DEFAULTED = ("QK_SCALE", "PRETRAINED_WINDOW_SIZES")  # no tensor ever tells the first; few files lack the second
_MOST_STAGES = 16


def config_for(checkpoint: Checkpoint, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """The checked, frozen config of a checkpoint: that of its run card, or the one that its keys and shapes tell.

    `overrides` maps dotted keys to values, as in `load_config`; they also decide what the file leaves open. Raises
    UsageError where several shipped configurations fit, which it names, or where a file of no shipped geometry leaves
    something open; SwinQuantError for what is no checkpoint of a Swin.
    """
    overrides = overrides or {}
    file = checkpoint.source.path if isinstance(checkpoint, Weights) else local_file(checkpoint)
    if (card := card_of(file)) is not None:
        return from_dict(card.config, str(card_path(file)), overrides)
    weights = read_weights(checkpoint if isinstance(checkpoint, Weights) else file)
    known = _known(weights, overrides)
    candidates = fitting(known)
    chosen = choose(candidates, known, file) if candidates else None
    cfg = _of_shipped(chosen, known, overrides, file) if chosen else _of_its_own(known, overrides, file)
    check_footprint(cfg, file)
    return cfg


def _known(weights: Weights, overrides: Mapping[str, Any]) -> Geometry:
    """What the file tells, and what the user says of the rest."""
    file, told = weights.source.path, geometry(weights.state)
    if not told:
        raise SwinQuantError(f"{file}: is no checkpoint of a Swin Transformer")
    _check_stages(weights, told)
    if "NUM_CLASSES" not in told and "MODEL.NUM_CLASSES" not in overrides:
        raise UsageError(f"{file}: has no head: set MODEL.NUM_CLASSES and have the head replaced by a new one")
    places = {key: _place(key, told) for key in (*_OPEN, "NUM_CLASSES") if key not in told}
    said = {key: place for key, place in places.items() if place in overrides}
    cfg = default_config()
    merge(cfg, {place: overrides[place] for place in said.values()} | {"MODEL.TYPE": told["TYPE"]}, "command line")
    return told | {key: _at(cfg, place) for key, place in said.items()}


def _check_stages(weights: Weights, told: Geometry) -> None:
    """Refuse what no config can describe: stages left out, or windows of their own in each."""
    file, stages = weights.source.path, len(told["DEPTHS"])
    if stages > _MOST_STAGES or any(f"layers.{i}.blocks.0.norm1.weight" not in weights.state for i in range(stages)):
        raise SwinQuantError(f"{file}: is a damaged checkpoint of a Swin: not every stage has its first block")
    windows = stage_windows(weights.state, range(stages))
    if None in windows:
        return
    sides = [told["IMG_SIZE"] // told["PATCH_SIZE"] >> i if "IMG_SIZE" in told else windows[0] for i in range(stages)]
    if windows != [min(windows[0], side) for side in sides]:
        raise SwinQuantError(
            f"{file}: is a Swin whose stages have windows of their own, {windows}, as those of Swin-S3: not supported"
        )


def _of_shipped(chosen: Candidate, known: Geometry, overrides: Mapping[str, Any], file: Path) -> CfgNode:
    own = {"MODEL.NUM_CLASSES": known["NUM_CLASSES"]}
    if known["NUM_CLASSES"] != chosen.geometry["NUM_CLASSES"]:  # a model of the user's, trained from ours
        own["MODEL.NAME"] = name_of(file)
    cfg = load_config(chosen.file, overrides={**own, **overrides})
    log.info("%s: is of the shipped configuration %s, %d classes", file, chosen.name, cfg.MODEL.NUM_CLASSES)
    return cfg


def _of_its_own(known: Geometry, overrides: Mapping[str, Any], file: Path) -> CfgNode:
    """A config from keys and shapes alone."""
    near = nearest(known)
    unlike = f"no shipped configuration fits (the nearest is {near.name}: {difference(known, near.geometry)})"
    keys = (*_ELSEWHERE, *default_config().MODEL[str(known["TYPE"]).upper()])
    absent = [key for key in keys if key not in known and key not in _DEFAULTED]
    if lost := [key for key in absent if key not in _OPEN]:
        raise SwinQuantError(f"{file}: is a damaged checkpoint of a Swin: no tensor tells {listed(lost)}")
    if absent:
        places = " and ".join(_place(key, known) for key in absent)
        raise UsageError(f"{file}: its keys and shapes leave {places} open, and {unlike}: set it, or give --cfg NAME")
    stages = len(known["DEPTHS"])
    own = {"PRETRAINED_WINDOW_SIZES": [0] * stages} | known if known["TYPE"] == "swinv2" else known
    tree = {"MODEL.NAME": name_of(file), **{_place(key, known): value for key, value in own.items()}}
    cfg = from_dict(tree, str(file), overrides)
    log.info("%s: %s, so the configuration is its own; crop %s and interpolation %s are guesses: TEST.CROP, "
             "DATA.INTERPOLATION", file, unlike, cfg.TEST.CROP, cfg.DATA.INTERPOLATION)  # fmt: skip
    return cfg


def _place(key: str, known: Geometry) -> str:
    return _ELSEWHERE.get(key, f"MODEL.{str(known['TYPE']).upper()}.{key}")


def _at(cfg: CfgNode, place: str) -> Any:
    node = cfg
    for name in place.split("."):
        node = node[name]
    return node
