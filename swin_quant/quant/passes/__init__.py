"""Passes: what makes a calibrated network better without labels. A file each, which holds a PASS; `quant.names` lists
them."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from swin_quant.quant.names import PASSES as _NAMES
from swin_quant.quant.passes.kind import Pass

_ONCE_CHOOSING = {"erq"}  # passes of older cards that are gone, and chose ranges


def passes() -> dict[str, Pass]:
    """Every pass by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PASS for name in _NAMES}


def choosing_ranges(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the kept passes of a run card that chose ranges, to which weights were fitted."""
    choosing = {name for name, kind in passes().items() if kind.of_ranges} | _ONCE_CHOOSING
    return [one["name"] for one in records if one["kept"] and one["name"] in choosing]
