"""Class names of a head from its publisher: in `config.json`, or by the data set that it was trained on."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.cards.records import NAMES, are_names
from swin_quant.checkpoint.opened import Checkpoint, open_checkpoint
from swin_quant.checkpoint.published import description_in
from swin_quant.checkpoint.sources import WEIGHTS, timm_name
from swin_quant.config.outputs import LOGITS
from swin_quant.data.class_names import is_usual_imagenet, list_wnids

_IMAGENET_TAG = re.compile(r"(?:^|[_.])in(?:1k|12k|21k|22k)$")  # timm's tag: the data set of the head


def class_names(checkpoint: Checkpoint, classes: int) -> list[str]:
    """The class names in the checkpoint's run card, else its publisher's; none where neither has any.

    SwinQuantError for a description that is broken: it names the file and the key.
    """
    checkpoint = open_checkpoint(checkpoint)
    try:
        card = checkpoint.card
    except SwinQuantError:  # a JSON file beside a float checkpoint that is no card
        card = None
    if card and card.class_names:
        return card.class_names
    if checkpoint.file.name not in WEIGHTS:
        return []
    path = checkpoint.file.with_name("config.json")
    config = description_in(path)
    pretrained = config["pretrained_cfg"] if isinstance(config.get("pretrained_cfg"), dict) else {}
    for key, names in (
        ("id2label", config.get("id2label")),
        ("label_names", config.get("label_names")),
        ("pretrained_cfg.label_names", pretrained.get("label_names")),
    ):
        if names is not None:
            return _checked(names, f"{path}: {key}", classes)
    name = timm_name(checkpoint.file)
    tag = pretrained.get("tag") or (import_timm().get_pretrained_cfg(name).tag if name else "")
    return list(list_wnids(classes) or ()) if isinstance(tag, str) and _IMAGENET_TAG.search(tag) else []


def _checked(names: Any, where: str, classes: int) -> list[str]:
    """The names in a list, or in a mapping of each index to one; none for placeholders."""
    if not isinstance(names, Mapping | Sequence) or isinstance(names, str):
        raise SwinQuantError(f"{where} is neither a list of class names nor a mapping of numbers to them")
    if len(names) != classes:
        raise SwinQuantError(f"{where} has {len(names)} names, the head {classes} classes: correct one of them")
    if isinstance(names, Mapping):
        wanted = list(map(str, range(classes)))
        if missing := [key for key in wanted if key not in names]:
            strange = listed(f"{key!r:.40}" for key in names.keys() - {*wanted})
            raise SwinQuantError(f"{where} has no {listed(missing)}, but {strange}: keys are 0 to {classes - 1}")
        names = [names[key] for key in wanted]
    names = [str(name) if type(name) is int else name for name in names]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not are_names([name]):
            raise SwinQuantError(f"{where}: {index} is {name!r:.60}, no name: must be {NAMES}")
    if not are_names(names):
        raise SwinQuantError(f"{where} must be {NAMES}")
    if names in ([f"LABEL_{index}" for index in range(classes)], list(map(str, range(classes)))):
        return []  # transformers' placeholders
    if is_usual_imagenet(names):
        return list(list_wnids(classes) or ())
    again = [name for name, count in Counter(names).items() if count > 1]
    if again and not list_wnids(classes):  # ImageNet has two classes named crane
        places = listed(str(index) for index, name in enumerate(names) if name == again[0])
        raise SwinQuantError(f"{where}: {places} are all called {again[0]:.60}: give each its own name")
    return names


def read_class_names(cfg: CfgNode, checkpoint: Checkpoint | None, replace_head: bool = False) -> list[str]:
    """The class names of a checkpoint's head, if they are known; none for a new head."""
    if checkpoint is None or replace_head or cfg.MODEL.OUTPUT_KIND != LOGITS:
        return []
    return class_names(checkpoint, cfg.MODEL.NUM_CLASSES)
