"""Bars are for a person at a terminal, lines for a log; messages obey --verbose and --quiet."""

import io
import itertools
import logging

import pytest
from rich.console import Console

from swin_quant.base import progress
from swin_quant.train.loop import bar
from swin_quant.train.snapshot import Position


@pytest.fixture
def screen(monkeypatch):
    """screen(terminal) -> the text that the console has written."""

    def make(terminal):
        text = io.StringIO()
        monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=terminal, width=100))
        monkeypatch.setattr(progress, "bars", progress.bars)  # which `set_up` changes
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


@pytest.fixture
def seconds(monkeypatch):
    """seconds(step): from now on, each reading of the clock is `step` seconds later."""

    def make(step):
        times = itertools.count(0, step)
        monkeypatch.setattr(progress, "clock", lambda: next(times))

    return make


@pytest.mark.parametrize(
    ("step", "count", "total", "shown"),
    [
        (2, 6, 6, ["working: 3 of 6, 6 s, about 6 s left", "working: 6 of 6, 12 s"]),
        (4, 4, None, ["working: 2, 8 s", "working: 4, 16 s"]),
        (7000, 2, 4, ["working: 1 of 4, 117 min, about 5.8 h left", "working: 2 of 4, 3.9 h, about 3.9 h left"]),
        (0.5, 9, 9, []),
    ],
)
def test_without_a_terminal_lines_say_how_far_it_is(screen, seconds, step, count, total, shown):
    text = screen(False)
    progress.set_up()
    seconds(step)
    assert list(progress.track(range(count), "working", total)) == list(range(count))
    assert text.getvalue().splitlines() == shown


@pytest.mark.parametrize(("terminal", "flags"), [(True, {}), (False, {"quiet": True}), (False, {"rank": 1})])
def test_lines_are_for_where_no_bar_is_and_for_rank_0(screen, seconds, terminal, flags):
    text = screen(terminal)
    progress.set_up(**flags)
    seconds(60)
    list(progress.track(range(3), "working", 3))
    assert ", about" not in text.getvalue()


def test_training_says_loss_and_speed(screen, seconds):
    text = screen(False)
    progress.set_up()
    seconds(3)
    with bar(total=10, done=4) as show:
        for total in (5, 6):
            show(Position(epoch=2, total=total), loss=1.5, lr=1e-3, speed=12.0)
    assert text.getvalue() == "epoch 3: 6 of 10 steps, loss 1.500, lr 1.00e-03, 12 images/s, 6 s, about 12 s left\n"


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
    progress.log.warning("%s", "beware")  # once in a command
    assert text.getvalue().splitlines() == shown
    progress.set_up(**flags)
    progress.log.warning("beware")
    assert text.getvalue().splitlines() == [*shown, "warning: beware"]


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
