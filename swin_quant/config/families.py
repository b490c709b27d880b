"""Families of models as data: the keys of their configuration, and of their checkpoints. The network itself is above.

A family called `name` is MODEL.TYPE `name`, and its keys are those of the section MODEL.<NAME>. Swin's two are built
in (`config.swin`); those of installed packages come with their architectures (`models.registry`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.plugins import announced
from swin_quant.base.progress import log

ENTRY_POINTS = "swin_quant.architectures"  # the group of an installed package's ARCHITECTURE
_registered: dict[str, "Family"] = {}


def _anything_goes(cfg: CfgNode, source: str) -> None:
    """No value is impossible."""


@dataclass(frozen=True)
class Family:
    """What is known of a family of models by its keys alone.

    `defaults` are the keys of its section, each with a value of its type; `optional` those that may be None, with a
    value of the type. `check` refuses, by UsageError, values that no model can be built from; it is given the source to
    name. `derived`: ends of the names of buffers that the config determines, which a checkpoint may leave out; `head`:
    the parameters of its classifier. `rename` undoes other ways of naming: a state_dict to that under the family's
    names, and what the ways are called. `policy`: the one to calibrate under where nobody names one.
    """

    name: str
    defaults: Mapping[str, Any]
    check: Callable[[CfgNode, str], None] = _anything_goes
    optional: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    head: tuple[str, ...] = ("head.weight", "head.bias")
    rename: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]] | None = None
    policy: str = "qdq"

    @property
    def section(self) -> str:
        """The key of its section in MODEL."""
        return self.name.upper()


def families() -> dict[str, Family]:
    """Every family by its name: the built-in ones first."""
    return {**_found(), **_registered}


def built_in() -> dict[str, Family]:
    """Swin's, whose keys every configuration has, and every run card."""
    from swin_quant.config.swin import SWIN, SWINV2

    return {family.name: family for family in (SWIN, SWINV2)}


def register_family(family: Family) -> None:
    """Add a family, for this process. UsageError if another one has its name."""
    if families().get(family.name, family) != family:
        raise UsageError(f"architecture {family.name!r}: there is one of that name already: choose another")
    _registered[family.name] = family


@cache
def _found() -> dict[str, Family]:
    from swin_quant.config.timm import TIMM

    found = {**built_in(), TIMM.name: TIMM}
    for who, architecture in announced(ENTRY_POINTS, "Architecture", _has_family):
        if found.setdefault(architecture.family.name, architecture.family) != architecture.family:
            log.warning("%s: left out, another architecture is called %s", who, architecture.family.name)
    return found


def _has_family(found: Any) -> bool:
    return isinstance(getattr(found, "family", None), Family)
