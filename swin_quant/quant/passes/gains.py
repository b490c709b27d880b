"""The gains of a network's units by a pass, and a note about them for every pass that goes unit by unit."""

import math
from collections.abc import Mapping

from swin_quant.base.errors import listed


def gain_db(before: float, after: float) -> float:
    """The dB by which a unit's error fell; 0 if it did not, NaN if the unit's output is not finite."""
    if after == math.inf:
        return math.nan
    if not after < before:
        return 0.0
    return 10 * math.log10(before / after) if after else math.inf


def note_of(gains: Mapping[str, float], units: int) -> str:
    """The gains of `units` units in words, with the names of units that were not finite and so left unchanged."""
    lost = [name for name, gain in gains.items() if math.isnan(gain)]
    better = [gain for gain in gains.values() if gain > 0]
    finite = [gain for gain in better if gain < math.inf]
    words = f"{len(better)} of {units} units gain"
    if finite or not better:
        words += f", {max(finite, default=0.0):.1f} dB at most"
    return words + (f"; not finite, and left as they were: {listed(lost, 3)}" if lost else "")
