"""What differs between run cards: each setting that is not the same in all of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swin_quant.cards.card import RunCard
from swin_quant.report.column import Column, ReportTable
from swin_quant.report.html import html_table

# What was decided or given; results are in their own tables, and lists of files are named by their hash.
_PARTS = ("config", "preprocess", "source", "checkpoint", "policy", "calibration", "training", "artifact", "versions")
_LEFT_OUT = ("files", "advice", "epochs", "passes", "others", "path", "check", "unreadable")
MOST = 80  # characters of a cell


def differences(cards: Sequence[RunCard]) -> str:
    """An HTML table: a line for each setting, a column for each card."""
    flat = [dict(_flat(card)) for card in cards]
    keys = [
        key for key in dict.fromkeys(key for each in flat for key in each) if len({each.get(key) for each in flat}) > 1
    ]
    columns: list[Column[str]] = [Column("setting", "setting", str)]
    columns += [_column(number, card, each) for number, (card, each) in enumerate(zip(cards, flat, strict=True))]
    return html_table(ReportTable(columns, keys)) if keys else "<p>Nothing.</p>"


def _column(number: int, card: RunCard, values: Mapping[str, str]) -> Column[str]:
    title = card.artifact["file"] if card.artifact else card.checkpoint["file"] if card.checkpoint else card.name
    return Column(str(number), title, lambda key: values.get(key))


def _flat(card: RunCard) -> Iterator[tuple[str, str]]:
    content = card.to_dict()
    for part in _PARTS:
        yield from _leaves(part, content.get(part))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in _LEFT_OUT:
                yield from _leaves(f"{name}.{key}", each)
    elif value is not None:
        text = str(value)
        yield name, text if len(text) <= MOST else f"{text[: MOST - 1]}…"
