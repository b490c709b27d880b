"""Every family of models: Swin's two, timm's, and those that installed packages announce."""

from functools import cache
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.base.extras import announced
from swin_quant.base.progress import log
from swin_quant.config.family import Family
from swin_quant.config.swin import SWIN, SWINV2
from swin_quant.config.timm import TIMM

ENTRY_POINTS = "swin_quant.architectures"  # the group of an installed package's ARCHITECTURE
BUILT_IN = (SWIN, SWINV2)  # every configuration and every run card has their keys
_registered: dict[str, Family] = {}


def families() -> dict[str, Family]:
    """Every family by its name: the built-in ones first."""
    return {**_discovered(), **_registered}


def register_family(family: Family) -> None:
    """Add a family, for this process. UsageError if another one has its name."""
    if families().get(family.name, family) != family:
        raise UsageError(f"architecture {family.name!r}: there is one of that name already: choose another")
    _registered[family.name] = family


@cache
def _discovered() -> dict[str, Family]:
    found = {family.name: family for family in (*BUILT_IN, TIMM)}
    for who, architecture in announced(ENTRY_POINTS, "Architecture", _has_family):
        if found.setdefault(architecture.family.name, architecture.family) != architecture.family:
            log.warning("%s: left out, another architecture is called %s", who, architecture.family.name)
    return found


def _has_family(found: Any) -> bool:
    return isinstance(getattr(found, "family", None), Family)
