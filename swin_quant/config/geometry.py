"""Configurations that no Swin can be built from are refused, by key, value and file."""

import re

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.defaults import architecture
from swin_quant.config.values import leaves, show

_CHOICES = {
    "MODEL.TYPE": ("swin", "swinv2"),
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "lanczos", "nearest"),
    "DATA.CACHE_MODE": ("no", "full", "part"),
}
_RATES = ("MODEL.DROP_RATE", "MODEL.DROP_PATH_RATE", "MODEL.LABEL_SMOOTHING")
# Positive numbers, and the most that can be meant: what is far beyond any Swin is a slip, and would take all memory.
_MOST = {"DATA.IMG_SIZE": 8192, "DATA.BATCH_SIZE": 2**20, "MODEL.NUM_CLASSES": 2**20}
_MOST_IN_MODEL = {
    "PATCH_SIZE": 1024,
    "IN_CHANS": 1024,
    "EMBED_DIM": 8192,
    "DEPTHS": 256,
    "NUM_HEADS": 4096,
    "WINDOW_SIZE": 1024,
    "MLP_RATIO": 256,
}
_PER_STAGE = ("DEPTHS", "NUM_HEADS", "PRETRAINED_WINDOW_SIZES")


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no Swin can be built from; `source` is the file that the UsageError names.

    Stage i works at R_i = IMG_SIZE / PATCH_SIZE / 2^i and in windows of min(WINDOW_SIZE, R_i) (docs/reference,
    section 1.2): R_i must be a multiple of its window, and even where patches are merged.
    """
    _check_values(cfg, source)
    node, swin = f"MODEL.{cfg.MODEL.TYPE.upper()}", architecture(cfg)
    size, patch = cfg.DATA.IMG_SIZE, swin.PATCH_SIZE
    _need(size % patch == 0, source, f"DATA.IMG_SIZE {size} is not a multiple of {node}.PATCH_SIZE {patch}")
    resolution, channels = size // patch, swin.EMBED_DIM
    for stage, heads in enumerate(swin.NUM_HEADS):
        here = f"stage {stage}, {resolution} x {resolution} (DATA.IMG_SIZE {size}, {node}.PATCH_SIZE {patch})"
        window = min(swin.WINDOW_SIZE, resolution)
        _need(resolution % window == 0, source, f"{node}.WINDOW_SIZE {swin.WINDOW_SIZE} does not divide {here}")
        alone = cfg.MODEL.TYPE == "swinv2" and window == 1 and swin.PRETRAINED_WINDOW_SIZES[stage] == 0
        _need(not alone, source, f"a window of 1 has no relative coordinates: {here}; choose a larger DATA.IMG_SIZE")
        problem = f"{node}.NUM_HEADS {heads} does not divide the {channels} channels of stage {stage}"
        _need(channels % heads == 0, source, f"{problem} ({node}.EMBED_DIM {swin.EMBED_DIM} x 2^{stage})")
        last = stage == len(swin.NUM_HEADS) - 1
        _need(last or resolution % 2 == 0, source, f"patches of an odd resolution cannot be merged: {here}")
        resolution, channels = resolution // 2, channels * 2


def _check_values(cfg: CfgNode, source: str) -> None:
    """What each key, and the lists of one entry a stage, must hold on their own."""
    values = dict(leaves(cfg))
    for key, choices in _CHOICES.items():
        _need(values[key] in choices, source, f"{key} is {values[key]!r}, but must be one of {', '.join(choices)}")
    for key in _RATES:
        _need(0 <= values[key] < 1, source, f"{key} is {values[key]}, but must be at least 0 and below 1")
    name, tag = cfg.MODEL.NAME, cfg.TAG
    usable = re.fullmatch(r"[^/\\\x00-\x1f\ud800-\udfff]{1,200}", name) is not None and name not in (".", "..")
    _need(usable, source, f"MODEL.NAME {show.repr(name)} cannot name a file: no slashes, 1 to 200 characters")
    usable = re.fullmatch(r"[^\x00-\x1f\ud800-\udfff]{0,200}", tag) is not None
    _need(usable, source, f"TAG (--tag) {show.repr(tag)} cannot name a folder: up to 200 characters of UTF-8")
    node, swin = f"MODEL.{cfg.MODEL.TYPE.upper()}", architecture(cfg)
    for key, most in {**_MOST, **{f"{node}.{key}": most for key, most in _MOST_IN_MODEL.items()}}.items():
        numbers = values[key] if isinstance(values[key], list) else [values[key]]
        _need(min(numbers, default=0) > 0, source, f"{key} is {show.repr(values[key])}, but must be positive")
        _need(max(numbers) <= most, source, f"{key} is {show.repr(values[key])}, but must be at most {most}")
    lists = {f"{node}.{key}": swin[key] for key in _PER_STAGE if key in swin}
    shown = ", ".join(f"{key} {entries}" for key, entries in lists.items())
    _need(len(set(map(len, lists.values()))) == 1, source, f"one entry a stage is needed in each of {shown}")
    pretrained = swin.get("PRETRAINED_WINDOW_SIZES", [])
    problem = f"{node}.PRETRAINED_WINDOW_SIZES is {pretrained}, but each must be 0 (none) or at least 2"
    _need(all(window == 0 or window > 1 for window in pretrained), source, problem)


def _need(holds: bool, source: str, problem: str) -> None:
    if not holds:
        raise UsageError(f"{source}: {problem}")


def check_channels(cfg: CfgNode) -> None:
    """UsageError for a model that does not take pictures as they are read, in three colours."""
    if (channels := architecture(cfg).IN_CHANS) != 3:
        raise UsageError(f"IN_CHANS is {channels}, but pictures are read in red, green and blue: it must be 3")
