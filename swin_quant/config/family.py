"""A family of models as data: the keys of its configuration and of its checkpoints, without the network.

A family called `name` is MODEL.TYPE `name`, and its keys are those of the section MODEL.<NAME>.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import checked


@dataclass(frozen=True)
class Family:
    """The configuration and checkpoint keys of a family of models.

    `defaults`: the keys of its section, each with a value of its type; `optional`: keys that may be None, with a value
    of the type. `check(cfg, source)` raises UsageError, naming the source, for values that no model can be built from.
    `derived`: ends of the names of buffers that the config determines and a checkpoint may leave out; `head`: the
    parameters of the classifier. `rename` gives a state_dict under the family's names, and the conventions it undid.
    `policy`: the default for calibration.
    """

    name: str
    defaults: Mapping[str, Any]
    check: Callable[[CfgNode, str], None] = lambda cfg, source: None
    optional: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    head: tuple[str, ...] = ("head.weight", "head.bias")
    rename: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]] | None = None
    policy: str = "qdq"

    @property
    def section(self) -> str:
        """The key of its section in MODEL."""
        return self.name.upper()


def need(holds: bool, source: str, problem: str) -> None:
    """UsageError that names the source, unless the condition holds."""
    if not holds:
        raise UsageError(f"{source}: {problem}")


def check_values(kinds: Mapping[str, Any], values: Mapping[str, Any], source: str, section: str = "") -> None:
    """UsageError unless the values of the keys of `kinds` are of those types (`base.schema`)."""
    for key, kind in kinds.items():
        checked(kind, values[key], source, f"{section}{key}", error=UsageError)
