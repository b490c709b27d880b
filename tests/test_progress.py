"""Bars are for a person at a terminal; messages obey --verbose and --quiet."""

import io
import logging

import pytest
from rich.console import Console

from swin_quant import progress


@pytest.fixture(autouse=True)
def restored():
    before = progress.log.handlers, progress.log.level, progress.log.propagate, progress.bars, logging.raiseExceptions
    yield
    progress.log.handlers, progress.log.level, progress.log.propagate, progress.bars, logging.raiseExceptions = before


@pytest.fixture
def screen(monkeypatch):
    """screen(terminal) -> the text that the console has written to it."""

    def make(terminal):
        text = io.StringIO()
        monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=terminal, width=100))
        return text

    return make


def test_items_pass_in_order_and_lazily(screen):
    screen(False)
    seen = []
    tracked = progress.track((seen.append(n) or n for n in range(3)), "counting", 3)
    assert next(tracked) == 0 and seen == [0] and list(tracked) == [1, 2]


@pytest.mark.parametrize(
    ("terminal", "quiet", "rank", "shown"),
    [(True, False, 0, True), (False, False, 0, False), (True, True, 0, False), (True, False, 1, False)],
)
def test_bars_are_for_terminals_of_rank_0_unless_quiet(screen, terminal, quiet, rank, shown):
    text = screen(terminal)
    progress.set_up(quiet=quiet, rank=rank)
    assert list(progress.track(range(3), "counting", 3)) == [0, 1, 2]
    assert ("counting" in text.getvalue()) is shown
    assert shown or text.getvalue() == ""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, ["message", "warning: beware"]),
        ({"verbose": True}, ["detail", "message", "warning: beware"]),
        ({"quiet": True}, ["warning: beware"]),
        ({"rank": 1}, ["warning: beware"]),
        ({"rank": 1, "verbose": True}, ["warning: beware"]),
    ],
)
def test_messages(screen, flags, shown):
    text = screen(False)
    progress.set_up(**flags)
    progress.log.debug("detail")
    progress.log.info("message")
    progress.log.warning("beware")
    assert text.getvalue().splitlines() == shown


def test_a_long_message_stays_one_line_and_markup_is_text(screen):
    text = screen(False)
    progress.set_up()
    progress.log.info("[bold]%s[/bold]", "x" * 300)
    assert text.getvalue() == f"[bold]{'x' * 300}[/bold]\n"


def test_a_log_that_cannot_be_written_does_not_fill_the_screen(screen, capsys):
    """/dev/full is a disk without space."""
    screen(False)
    progress.set_up()
    try:
        progress.log.addHandler(logging.FileHandler("/dev/full"))
    except OSError:
        pytest.skip("no /dev/full here")
    progress.log.info("message")
    assert capsys.readouterr().err == ""
