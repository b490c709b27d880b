"""Class names of a head from its publisher: in `config.json`, or by the data set that it was trained on."""

import re
from collections.abc import Mapping
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.schema import checked
from swin_quant.cards.records import ClassNames
from swin_quant.checkpoint.opened import Checkpoint, open_checkpoint
from swin_quant.checkpoint.published import description_in
from swin_quant.checkpoint.sources import WEIGHTS, timm_name
from swin_quant.config.outputs import LOGITS
from swin_quant.data.class_names import is_usual_imagenet, list_wnids

_IMAGENET_TAG = re.compile(r"(?:^|[_.])in(?:1k|12k|21k|22k)$")  # timm's tag: the data set of the head


def read_class_names(cfg: CfgNode, checkpoint: Checkpoint | None, replace_head: bool = False) -> list[str]:
    """The class names of a checkpoint's head, in its run card, else its publisher's; none if neither has any, or for a
    new head.

    SwinQuantError for a description that is broken: it names the file and the key.
    """
    if checkpoint is None or replace_head or cfg.MODEL.OUTPUT_KIND != LOGITS:
        return []
    checkpoint, classes = open_checkpoint(checkpoint), cfg.MODEL.NUM_CLASSES
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
    told = {key: config.get(key) for key in ("id2label", "label_names")}
    for key, names in (told | {"pretrained_cfg.label_names": pretrained.get("label_names")}).items():
        if names is not None:
            return _read_names(names, str(path), key, classes)
    name = timm_name(checkpoint.file)
    tag = pretrained.get("tag") or (import_timm().get_pretrained_cfg(name).tag if name else "")
    return list(list_wnids(classes) or ()) if isinstance(tag, str) and _IMAGENET_TAG.search(tag) else []


def _read_names(names: Any, where: str, key: str, classes: int) -> list[str]:
    """The names in a list, or in a mapping of each index to one; none for placeholders."""
    if isinstance(names, Mapping) and len(names) == classes:
        names = [names.get(str(index)) for index in range(classes)]
    texts = [str(name) if type(name) is int else name for name in names] if isinstance(names, list) else names
    names = checked(ClassNames, texts, where, key)
    if len(names) != classes:
        raise SwinQuantError(f"{where}: {key} has {len(names)} names, the head {classes} classes: correct one of them")
    if names in ([f"LABEL_{index}" for index in range(classes)], list(map(str, range(classes)))):
        return []  # transformers' placeholders
    if is_usual_imagenet(names):
        return list(list_wnids(classes) or ())
    return names
