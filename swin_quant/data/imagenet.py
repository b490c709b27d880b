"""ImageNet's classes: a wnid each (`n01440764`), and their order in the heads of published models."""

import re
from functools import lru_cache
from typing import Any

from swin_quant.base.compat import import_timm

ILSVRC_CLASSES = 1000


def is_wnid(name: str) -> bool:
    """Whether a name has the form of a wnid: n and eight digits."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


@lru_cache(maxsize=2)
def wnids_of(classes: int) -> tuple[str, ...] | None:
    """The wnids of ImageNet-1k (1000 classes), -22k, ... in the order of published heads, from timm's lists; None for
    another number. ImageNet-1k's are sorted."""
    import_timm()
    from timm.data import infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": classes})
    return tuple(_info(subset).label_names()) if subset else None


def english_of(name: str) -> str:
    """ImageNet's English names for a wnid, separated by commas; any other name unchanged."""
    try:
        return str(_info("imagenet-22k").label_name_to_description(name)) if is_wnid(name) else name
    except KeyError:
        return name


@lru_cache(maxsize=2)
def _info(subset: str) -> Any:
    import_timm()
    from timm.data import ImageNetInfo

    return ImageNetInfo(subset)
