"""Passes: what makes a calibrated network better without labels. A file each, which holds a PASS; `quant.names` lists
them."""

import importlib

from swin_quant.quant.names import PASSES as _NAMES
from swin_quant.quant.passes.kind import Pass


def passes() -> dict[str, Pass]:
    """Every pass by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PASS for name in _NAMES}
