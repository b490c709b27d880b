"""Where a command leaves its results, and how it shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.cards.card import RunCard


def output_dir(cfg: CfgNode) -> Path:
    """FasterTransformer's place: <output>/<NAME>/<TAG>."""
    return Path(cfg.OUTPUT or "output") / cfg.MODEL.NAME / cfg.TAG


def print_table(cards: Sequence[RunCard]) -> None:
    """The accuracy-delta table on standard output."""
    from swin_quant.report.accuracy.render import print_terminal

    print_terminal(cards)
