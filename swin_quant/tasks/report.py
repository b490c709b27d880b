"""The run cards that a table is of: files, or all that lie directly in a directory."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import read_json
from swin_quant.base.progress import log
from swin_quant.cards.card import FAMILY, RunCard

_NO_RESULT = "no result: run `swin-quant evaluate`"


def with_results(cards: Mapping[Path, RunCard]) -> dict[Path, RunCard]:
    """The cards with results; those without are left out, with a warning that names them."""
    empty = [str(path) for path, card in cards.items() if not card.results]
    if len(empty) == len(cards):
        raise SwinQuantError(f"{listed(empty)}: {_NO_RESULT}")
    if empty:
        log.warning("left out: %s: %s", listed(empty), _NO_RESULT)
    return {path: card for path, card in cards.items() if card.results}


def read_cards(paths: Iterable[Path]) -> dict[Path, RunCard]:
    """The cards by file, as they are named."""
    files = [file for path in paths for file in (_cards_in(path) if path.is_dir() else (path,))]
    return {file: RunCard.read(file) for file in dict.fromkeys(files)}


def _cards_in(directory: Path) -> Iterator[Path]:
    found = [file for file in sorted(directory.glob("*.json")) if is_card(file)]
    if not found:
        raise SwinQuantError(f"{directory}: no run card (*.json) in this directory")
    yield from found


def is_card(file: Path) -> bool:
    """Whether a file calls itself a run card, of whatever version."""
    try:
        content = read_json(file, "run card")
    except SwinQuantError:
        return False
    schema = content.get("schema") if isinstance(content, dict) else None
    return isinstance(schema, str) and schema.startswith(FAMILY)
