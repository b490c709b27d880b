"""ImageNet's classes: a wnid each (`n01440764`), and their order in the heads of published models."""

import re
from functools import lru_cache

from swin_quant.base.compat import import_timm

ILSVRC_CLASSES = 1000


def is_wnid(name: str) -> bool:
    """Whether a name has the form of a wnid: n and eight digits."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


@lru_cache(maxsize=2)
def wnids_of(classes: int) -> tuple[str, ...] | None:
    """The wnids of ImageNet-1k (1000 classes), -22k, ... in the order of published heads, from the lists that timm
    ships; None for another number. ImageNet-1k's are in sorted order.
    """
    import_timm()
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    return tuple(ImageNetInfo(subset).label_names())  # type: ignore[no-untyped-call]  # timm gives it no types
