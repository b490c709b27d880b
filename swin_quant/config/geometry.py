"""Configurations that no model can be built from are refused, by key, value and file."""

import re

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import show
from swin_quant.config.defaults import architecture
from swin_quant.config.families import families
from swin_quant.config.values import leaves, need, need_numbers

_CHOICES = {
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "lanczos", "nearest"),
    "DATA.CACHE_MODE": ("no", "full", "part"),
}
_RATES = ("MODEL.DROP_RATE", "MODEL.DROP_PATH_RATE", "MODEL.LABEL_SMOOTHING")
_MOST = {"DATA.IMG_SIZE": 8192, "DATA.BATCH_SIZE": 2**20, "MODEL.NUM_CLASSES": 2**20}


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no model can be built from; `source` is the file that the UsageError names."""
    values = dict(leaves(cfg))
    for key, choices in {"MODEL.TYPE": tuple(families()), **_CHOICES}.items():
        need(values[key] in choices, source, f"{key} is {values[key]!r}, but must be one of {', '.join(choices)}")
    for key in _RATES:
        need(0 <= values[key] < 1, source, f"{key} is {values[key]}, but must be at least 0 and below 1")
    name, tag = cfg.MODEL.NAME, cfg.TAG
    usable = re.fullmatch(r"[^/\\\x00-\x1f\ud800-\udfff]{1,200}", name) is not None and name not in (".", "..")
    need(usable, source, f"MODEL.NAME {show(name)} cannot name a file: no slashes, 1 to 200 characters")
    usable = re.fullmatch(r"[^\x00-\x1f\ud800-\udfff]{0,200}", tag) is not None
    need(usable, source, f"TAG {show(tag)} cannot name a folder: up to 200 characters of UTF-8")
    for key, most in _MOST.items():
        need_numbers(key, values[key], most, source)
    families()[cfg.MODEL.TYPE].check(cfg, source)


def check_channels(cfg: CfgNode) -> None:
    """UsageError for a model that does not take pictures as they are read, in three colours."""
    if (channels := architecture(cfg).get("IN_CHANS", 3)) != 3:
        raise UsageError(f"IN_CHANS is {channels}, but pictures are read in red, green and blue: it must be 3")
