"""Find the configuration of a checkpoint that came without one: in its run card, or from its keys and shapes.

Tensors leave some keys open: always the preprocessing, and the picture size if no mask is stored. Their values come
from the publisher's description beside the file, or from the shipped configuration with the same geometry. If several
fit that mean different models, the user has to choose. A configuration from the user is compared with the publisher's.
"""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import configs_dir, list_parts
from swin_quant.base.progress import tell_once
from swin_quant.base.reading import reads
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.backbones import as_backbone, as_embedding
from swin_quant.checkpoint.geometry import Geometry, describe, differing, geometry, stage_windows
from swin_quant.checkpoint.opened import Checkpoint, Weights, open_checkpoint
from swin_quant.checkpoint.published import HOW_PREPARED, published, timm_architecture
from swin_quant.checkpoint.sources import choose_name, timm_name
from swin_quant.config import architecture, default_config, find_config, from_dict, load_config, to_dict
from swin_quant.config.load import keys_set_in, merge, shipped_configs, value_at
from swin_quant.config.outputs import EMBEDDING, FEATURES, LOGITS
from swin_quant.config.sides import clipped, compute_map_size
from swin_quant.config.timm import HEADS, named


@functools.cache
def _shipped() -> dict[str, Geometry]:
    """The shipped configurations by name: their geometry, and the preprocessing that tells their models apart."""
    configs = {name: load_config(file) for name, file in shipped_configs().items()}
    return {
        name: {"TYPE": cfg.MODEL.TYPE, "NUM_CLASSES": cfg.MODEL.NUM_CLASSES, **_get_geometry(cfg)}
        | {"CROP": cfg.TEST.CROP, "INTERPOLATION": cfg.DATA.INTERPOLATION}
        for name, cfg in configs.items()
    }


def _choose(candidates: Mapping[str, Geometry], known: Geometry, name: str, file: Path) -> str:
    """The candidate that fits a model's name, then its number of classes; the plainest of several that differ only in
    training.

    UsageError, with the file and the candidates, if these are different models.
    """
    name = _plain(name)
    models = {each: repr(own | {"NUM_CLASSES": 0}) for each, own in candidates.items()}  # whatever their heads

    def likeness(candidate: str) -> int:
        """The length of a name that begins `name`; 1 for a name that `name` begins."""
        plain = _plain(candidate)
        return len(plain) if name.startswith(plain) else int(plain.startswith(name))

    def named_alike(among: Collection[str]) -> list[str]:
        return [each for each in among if likeness(each) == max(map(likeness, among))]

    alike = named_alike(candidates)
    same = {models[each] for each in alike}
    fit = [each for each, own in candidates.items() if models[each] in same and not differing(known, own)]
    left = named_alike(fit or alike)
    if len({models[each] for each in left}) > 1:
        keys = {key for each in left for key in differing(candidates[left[0]], candidates[each])} - known.keys()
        raise UsageError(
            f"{file}: fits several configurations, since its tensors do not tell "
            f"{listed(sorted(keys - {'CROP', 'INTERPOLATION'}))}: give ‹cfg› NAME, one of {listed(left, len(left))}"
        )
    return min(left, key=len)


def _plain(name: str) -> str:
    """A name without the parts that Microsoft, timm and Hugging Face write differently."""
    return name.lower().replace("-", "_").replace("_patch4", "").split(".")[0]


_ELSEWHERE = {"TYPE": "MODEL.TYPE", "NUM_CLASSES": "MODEL.NUM_CLASSES", "IMG_SIZE": "DATA.IMG_SIZE"}
_OPEN = ("IMG_SIZE", "WINDOW_SIZE", "PRETRAINED_WINDOW_SIZES")  # some files leave them open; the user may set them
_DEFAULTED = ("QK_SCALE", "PRETRAINED_WINDOW_SIZES")  # no tensor determines the first; few files lack the second
_CHANGED = re.compile(r"\.(weight_(orig|g|mask)|lora_[AB]|base_layer|parametrizations)\b")  # by torch or PEFT
_MOST_TABLES = 2**29  # elements of indices, coordinates and masks, which follow from the geometry and need no file


@reads("checkpoint")
def config_for(checkpoint: Checkpoint, overrides: Mapping[str, Any] | None = None) -> CfgNode:
    """The checked, frozen config of a checkpoint: from its run card, or else from its keys and shapes.

    `overrides` maps dotted keys to values, as in `load_config`; they also set the keys that the file leaves open.
    UsageError if several shipped configurations fit (it names them), or if a file of no shipped geometry leaves keys
    open (it names the keys). SwinQuantError for a file that is neither a Swin nor named as one of timm's models.
    """
    overrides = dict(overrides or {})
    checkpoint = open_checkpoint(checkpoint)
    file = checkpoint.file
    if (card := checkpoint.card) is not None:
        if card.wrapped:
            raise UsageError(f"{file}: holds a wrapped module, which only Python builds: `sq.load(FILE, module)`")
        cfg = from_dict(card.config, str(card_path(file)))
        return from_dict(card.config, str(card_path(file)), overrides | _trained_window(_get_geometry(cfg), overrides))
    weights = checkpoint.weights(str(overrides.get("MODEL.WEIGHTS", "")))
    kind = overrides.get("MODEL.OUTPUT_KIND", LOGITS)
    if kind == FEATURES:
        weights, features = as_backbone(weights, warns="MODEL.FEATURES.WINDOWS" not in overrides)
        overrides = features | dict(overrides)
    elif kind == EMBEDDING:
        weights = as_embedding(weights)
    determined = geometry(weights.state)
    if not determined:
        name = timm_name(file) or timm_architecture(weights.source)
        if isinstance(name, str):  # another model than a Swin, which its repository names
            described = published(weights.source, {"TYPE": "timm"}, overrides.keys()).keys
            return load_config(f"timm:{name}", overrides={**described, **_find_head_classes(weights), **overrides})
    changed = [key for key in weights.state if _CHANGED.search(key)]
    if changed or not determined or (kind != FEATURES and "norm.weight" not in weights.state):  # as of Donut
        raise SwinQuantError(f"{file}: is {describe(changed or weights.state)}")
    _check_stages(weights, determined)
    explicit = set(overrides)
    # There is no head, whatever the description says about classes
    if kind != LOGITS and "NUM_CLASSES" not in determined:
        determined["NUM_CLASSES"] = default_config().MODEL.NUM_CLASSES
        explicit.add("MODEL.NUM_CLASSES")
    description = published(weights.source, determined, explicit)
    known = _known(determined, description.keys, overrides, file)
    # A head with another number of classes is no contradiction
    candidates = {name: own for name, own in _shipped().items() if {*differing(known, own)} <= {"NUM_CLASSES"}}
    if not candidates and description.named:  # a model built for other sizes keeps the windows of its architecture
        own = next((own for name, own in _shipped().items() if _plain(name) == _plain(description.named)), {})
        pretrained = own.get("PRETRAINED_WINDOW_SIZES", [])[: len(known["DEPTHS"])]
        windows = {"WINDOW_SIZE": own.get("WINDOW_SIZE"), "PRETRAINED_WINDOW_SIZES": pretrained}
        known = {key: value for key, value in windows.items() if value} | known
    chosen = _choose(candidates, known, description.named or choose_name(file), file) if candidates else ""
    overrides = overrides | _trained_window({**candidates.get(chosen, {}), **known}, overrides)
    settings = {place: value for place, value in description.keys.items() if place.rpartition(".")[2] not in determined}
    settings |= overrides
    cfg = _from_shipped(chosen, known, settings, file) if chosen else _from_tensors(known, settings, file)
    _check_footprint(cfg, file)
    return cfg


def config_given(
    name: str | Path,
    checkpoint: Checkpoint | None,
    opts: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> CfgNode:
    """The user's configuration, with the publisher's values for keys that it leaves open."""
    path, more = find_config(name), dict(overrides or {})
    explicit = {*opts[::2], *more}
    cfg = load_config(path, opts, more, whole=False)
    opened = None if checkpoint is None else open_checkpoint(checkpoint)
    if opened is not None and opened.file.is_file():
        more |= _trained_window(_get_geometry(load_config(path, opts, whole=False)), more)
        if named(name) and "MODEL.NUM_CLASSES" not in explicit:  # the name gives ImageNet's
            more |= _find_head_classes(opened.weights(cfg.MODEL.WEIGHTS))
        cfg = load_config(path, opts, more, whole=False)
        stated = keys_set_in(path) | explicit
        if Path(path).is_relative_to(configs_dir()):  # a shipped name stands for the whole architecture
            stated |= {f"MODEL.{cfg.MODEL.TYPE.upper()}.{key}" for key in architecture(cfg)}
        cfg = agreed(cfg, opened, stated, explicit)
    return from_dict(to_dict(cfg), str(path))


def agreed(cfg: CfgNode, checkpoint: Checkpoint, stated: Set[str], explicit: Set[str] = frozenset()) -> CfgNode:
    """`cfg` with the publisher's values for keys that the user has not `stated`; unchanged beside a run card.

    A different preprocessing that the user stated is used, with a warning. A different model is a UsageError, unless
    its keys were set one by one (`explicit`).
    """
    checkpoint = open_checkpoint(checkpoint)
    file = checkpoint.file
    with contextlib.suppress(SwinQuantError):  # a JSON file beside a float checkpoint may be no card
        if checkpoint.card is not None:
            return cfg
    weights = checkpoint.weights(cfg.MODEL.WEIGHTS)
    determined = geometry(weights.state) or {"TYPE": cfg.MODEL.TYPE}
    if determined["TYPE"] != cfg.MODEL.TYPE:
        return cfg  # loading refuses it
    description = published(weights.source, determined, explicit, stated)
    node = f"MODEL.{cfg.MODEL.TYPE.upper()}."
    taken, other = {}, []
    for place, value in description.keys.items():
        used = value_at(cfg, place)
        if used == value or place in ("MODEL.TYPE", "MODEL.NUM_CLASSES"):  # loading compares these
            continue
        both = f"{description.where[place]} gives {place} {value}, and the configuration {used}"
        if place not in stated:
            taken[place] = value
        elif place.startswith(node):
            raise UsageError(f"{file}: {both}: set {place} to settle it")
        else:
            other.append(both)
    if other:
        told = f"{file}: the configuration overrides what its publisher says: {listed(other, len(other))}"
        tell_once(told, logging.WARNING, waits=True)
    if taken:
        shown = listed((f"{place} {value} ({description.where[place]})" for place, value in taken.items()), len(taken))
        tell_once(f"{file}: taken from its publisher, since the configuration leaves them open: {shown}", waits=True)
    return from_dict(to_dict(cfg), str(file), taken) if taken else cfg


def _get_geometry(cfg: CfgNode) -> Geometry:
    return {"IMG_SIZE": cfg.DATA.IMG_SIZE, **architecture(cfg)}


def _trained_window(own: Geometry, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """PRETRAINED_WINDOW_SIZES for a V2 in other windows: its network keeps the coordinates of its training."""
    place, key = "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "MODEL.SWINV2.WINDOW_SIZE"
    trained = any(own.get("PRETRAINED_WINDOW_SIZES", (1,)))  # absent: V1, or unknown
    if trained or place in overrides or key not in overrides or not {"IMG_SIZE", "WINDOW_SIZE"} <= own.keys():
        return {}
    if str(overrides[key]) == str(own["WINDOW_SIZE"]):
        return {}
    maps = [compute_map_size(own["IMG_SIZE"], own["PATCH_SIZE"], stage) for stage in range(len(own["DEPTHS"]))]
    windows = [max(clipped(own["WINDOW_SIZE"], tokens)) for tokens in maps]
    return {place: [window if window > 1 else 0 for window in windows]}


def _known(determined: Geometry, public: Mapping[str, Any], overrides: Mapping[str, Any], file: Path) -> Geometry:
    """The keys that the tensors determine, and open keys as set by the user, else by the publisher."""
    if "NUM_CLASSES" not in determined and "MODEL.NUM_CLASSES" not in overrides:
        another = "set MODEL.NUM_CLASSES and have the head replaced by a new one"
        raise UsageError(f"{file}: has no head: {another}, or take what there is (‹output_kind› features)")
    places = {key: _place(key, determined) for key in (*_OPEN, "NUM_CLASSES") if key not in determined}
    cfg, given = default_config(), {**public, **overrides}
    said = {place: given[place] for place in places.values() if place in given}
    merge(cfg, said, "command line")
    return determined | {key: value_at(cfg, place) for key, place in places.items() if place in said}


def _check_stages(weights: Weights, determined: Geometry) -> None:
    """Refuse a model that no config can describe: each stage has a window of its own."""
    file, stages = weights.source.path, len(determined["DEPTHS"])
    windows = [window for window in stage_windows(weights.state, range(stages)) if window is not None]
    if len(windows) < stages:
        return
    image = determined.get("IMG_SIZE")  # of a square: tensors show no other shape
    sides = [image // determined["PATCH_SIZE"] >> i if image else windows[0] for i in range(stages)]
    if windows != [min(windows[0], side) for side in sides]:
        raise SwinQuantError(
            f"{file}: is a Swin whose stages have windows of their own, {windows}, as those of Swin-S3: not supported"
        )


def _from_shipped(name: str, known: Geometry, settings: Mapping[str, Any], file: Path) -> CfgNode:
    own, chosen = {"MODEL.NUM_CLASSES": known["NUM_CLASSES"]}, _shipped()[name]
    if known["NUM_CLASSES"] != chosen["NUM_CLASSES"]:  # the user's model, trained from this one
        own["MODEL.NAME"] = choose_name(file)
    path = shipped_configs()[name]
    cfg = load_config(path, overrides={**own, **settings})
    assumed = [f"{key} {chosen[key]}" for key in _OPEN if key in chosen and key not in known]
    rest = f" ({listed(assumed)} from there, since no tensor shows it)" if assumed else ""
    tell_once(f"{file}: fits the configuration {name}{rest}, {cfg.MODEL.NUM_CLASSES} classes", waits=True)
    return cfg


def _from_tensors(known: Geometry, settings: Mapping[str, Any], file: Path) -> CfgNode:
    """A config from keys and shapes alone, if no shipped one fits."""
    unlike = "no shipped configuration fits"
    keys = (*_ELSEWHERE, *default_config().MODEL[str(known["TYPE"]).upper()])
    absent = [key for key in keys if key not in known and key not in _DEFAULTED]
    if lost := [key for key in absent if key not in _OPEN]:
        raise SwinQuantError(f"{file}: is a damaged checkpoint of a Swin: no tensor tells {listed(lost)}")
    if absent:
        places = " and ".join(_place(key, known) for key in absent)
        raise UsageError(f"{file}: its keys and shapes leave {places} open, and {unlike}: set it, or give ‹cfg› NAME")
    whole = {"PRETRAINED_WINDOW_SIZES": [0] * len(known["DEPTHS"]), **known}
    tree = {_place(key, known): whole[key] for key in (*_ELSEWHERE, *keys) if key in whole}
    cfg = from_dict({"MODEL.NAME": choose_name(file), **tree}, str(file), settings)
    # Few publishers have other shapes
    certain = ("TEST.SHAPE",) if cfg.TEST.CROP else ("TEST.SHAPE", "TEST.CROP_RATIO")
    guessed = [f"{key} {value_at(cfg, key)}" for key in HOW_PREPARED if key not in (*settings, *certain)]
    tell_once(f"{file}: {unlike}, so the configuration is its own", waits=True)
    if guessed:
        beside = Path(file).with_suffix(".yaml")
        advice = f"‹cfg› {beside} tells" if beside.is_file() else "give ‹cfg› FILE if the training had one"
        guess = ", ".join(guessed)
        tell_once(f"{file}: how pictures are prepared is a guess: {guess}; {advice}", logging.WARNING, waits=True)
    return cfg


def _place(key: str, known: Geometry) -> str:
    return _ELSEWHERE.get(key, f"MODEL.{str(known['TYPE']).upper()}.{key}")


def _find_head_classes(weights: Weights) -> dict[str, Any]:
    """The number of classes by its key, from the head of a model of timm; nothing if no head is found."""
    heads = (weights.state.get(f"{head}.weight") for head in HEADS)
    return next(({"MODEL.NUM_CLASSES": len(head)} for head in heads if head is not None and head.dim() > 1), {})


def _check_footprint(cfg: CfgNode, file: Path) -> None:
    """SwinQuantError if the model of `cfg` has more weights than `file` has bytes, or impossibly large tables."""
    a, weights, tables = architecture(cfg), 0, 0  # elements of matrices, and of the tables that the geometry gives
    width = a.EMBED_DIM
    for stage, depth in enumerate(a.DEPTHS):
        tokens = compute_map_size(cfg.DATA.IMG_SIZE, a.PATCH_SIZE, stage)
        length = math.prod(clipped(a.WINDOW_SIZE, tokens))
        weights += depth * width * (4 * width + 2 * int(width * a.MLP_RATIO))
        tables += depth * length**2 + depth // 2 * math.prod(tokens) * length
        width *= 2
    if weights > sum(part.stat().st_size for part in (file, *list_parts(file))) or tables > _MOST_TABLES:
        raise SwinQuantError(
            f"{file}: is a damaged checkpoint of a Swin: its keys and shapes belong to a model of {weights:,} weights "
            f"and tables of {tables:,} entries, more than the file can hold"
        )
