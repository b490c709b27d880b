"""Advice behind a calibration: said on the screen, a handful of lines, and all of it recorded."""

from collections.abc import Sequence

from swin_quant.base.distributed import World
from swin_quant.base.progress import log
from swin_quant.cards.records import AdviceRecord
from swin_quant.quant.advice import Advice

SHOWN = 5  # lines of advice, beside warnings


def told(advice: Sequence[Advice], world: World) -> list[AdviceRecord]:
    """Say it on rank 0, warnings first, and return it as a run card keeps it."""
    hints = [one for one in advice if not one.warns]
    if world.is_main:
        for one in advice:
            if one.warns:
                log.warning(one.text)
        for one in hints[:SHOWN]:
            log.info("advice: %s", one.text)
        if len(hints) > SHOWN:
            log.info("advice: %d more in the run card", len(hints) - SHOWN)
    plain = str.maketrans("", "", "‹›")  # a card does not know what a front door calls its fields
    return [AdviceRecord(kind=one.kind, text=one.text.translate(plain), nodes=list(one.nodes)) for one in advice]
