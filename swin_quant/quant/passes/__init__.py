"""Passes improve a calibrated network without labels: each a file with its PASS; `quant.names` lists them."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from swin_quant.quant.names import PASSES
from swin_quant.quant.passes.kind import Pass

_REMOVED = {"erq"}  # passes in older cards that chose ranges


def passes() -> dict[str, Pass]:
    """Every pass by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PASS for name in PASSES}


def choosing_ranges(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of a run card's kept passes that chose ranges, to which weights were then fitted."""
    choosing = {name for name, kind in passes().items() if kind.of_ranges} | _REMOVED
    return [one["name"] for one in records if one["kept"] and one["name"] in choosing]
