"""Add to a run card while other processes add to it: no result is lost, no newer file's card is overwritten."""

from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

from swin_quant.base.files import one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result


def update(path: Path, read: RunCard, change: Callable[[RunCard], RunCard]) -> RunCard:
    """Change the card at `path`, which may hold more by now than when it was `read`; returns the changed card.

    If it has become the card of another file, it is left alone with a warning, and the changed `read` is returned.
    """
    with one_at_a_time(path.parent):
        now = RunCard.read(path) if path.exists() else read
        if _whose(now) != _whose(read):
            log.warning("%s: became the run card of another file meanwhile: the new results are not in it", path)
            return change(read)
        changed = change(now)
        changed.write(path)
    return changed


def with_results(card: RunCard, results: Iterable[Result]) -> RunCard:
    """A card that also holds `results`; see `RunCard.with_result`."""
    return reduce(RunCard.with_result, results, card)


def _whose(card: RunCard) -> list[str | None]:
    return [record["sha256"] if record else None for record in (card.artifact, card.checkpoint, card.source)]
