"""The kinds of output of a model: the values of MODEL.OUTPUT_KIND and MODEL.FEATURES."""

from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import allow, within

LOGITS, EMBEDDING, FEATURES = OUTPUT_KINDS = ("logits", "embedding", "features")
"""Logits of a classifier; the pooled input of its head; the maps of its stages."""
TIMM, DETECTION, MMPRETRAIN = WINDOWS = ("timm", "detection", "mmpretrain")
"""How maps of any size are cut: as timm does (windows and shifts of the trained size; rolled, then padded), as
Microsoft's detection code and mmdetection do (whole windows, every other block shifted; padded, then rolled), or as
mmpretrain does: the same, but a map whose shorter side is one window is not shifted."""
PLAIN, LAST, EACH = NORMS = ("none", "last", "each")
"""Norms behind maps: none, the classifier's last norm behind the last stage, or one for each output."""

DEFAULTS: dict[str, Any] = {"STAGES": [], "WINDOWS": TIMM, "NORM": PLAIN}  # no stages: all
KINDS: dict[str, Any] = {
    "MODEL.OUTPUT_KIND": Annotated[str, allow(OUTPUT_KINDS)],
    "MODEL.FEATURES.STAGES": list[Annotated[int, within(least=0, most=15)]],
    "MODEL.FEATURES.WINDOWS": Annotated[str, allow(WINDOWS)],
    "MODEL.FEATURES.NORM": Annotated[str, allow(NORMS)],
}


def need_logits(kind: str, what: str) -> None:
    """UsageError for a model whose output is of another kind."""
    if kind != LOGITS:
        raise UsageError(f"{what} is about logits, and this model gives {say(kind)}: give a classifier")


def say(kind: str) -> str:
    """The kind of output in words: maps of stages, or pictures of a user's own network."""
    return "output maps" if kind == FEATURES else kind


def count_classes(cfg: CfgNode) -> int | None:
    """The number of logits; None if the model gives something else."""
    classes: int = cfg.MODEL.NUM_CLASSES
    return classes if cfg.MODEL.OUTPUT_KIND == LOGITS else None


def select_stages(cfg: CfgNode, count: int) -> tuple[int, ...]:
    """The stages, of `count`, whose maps are wanted, in order."""
    return tuple(cfg.MODEL.FEATURES.STAGES) or tuple(range(count))
