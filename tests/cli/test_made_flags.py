"""Flags made from a dataclass hold its fields' types, defaults and places."""

import argparse
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.cli.commands import COMMANDS
from swin_quant.cli.flags import Flag, Group, add_flags, options_from, words_from
from swin_quant.cli.session import command_of, parser_of


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Flag("a share", "SHARE")] = 0.5
    words: Annotated[tuple[str, ...], Flag("several", "WORD")] = ()


@dataclass(frozen=True)
class Outer:
    to: Annotated[str, Flag("where", "FILE")]
    file: Annotated[str | None, Flag("what", "FILE", or_flag=True)] = None
    count: Annotated[int, Flag("how many", "N", name="--number", names=("-n",))] = 3
    kind: Annotated[Literal["a", "b"] | None, Flag("which")] = None
    bits: Annotated[int | None, Flag("how fine", choices=(4, 8))] = None
    quiet: Annotated[bool, Flag("say less")] = False
    json: Annotated[str | None, Flag("print", "FILE", optional="-")] = None
    inner: Annotated[Inner, Group("inside")] = field(default_factory=Inner)
    untold: int = 7


def parsed(*words, **renamed):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Outer, renamed.get("renamed"))
    return options_from(parser.parse_args(words), Outer)


def test_what_is_not_given_has_the_default_of_the_dataclass():
    assert parsed("--to", "x") == Outer("x")


def test_every_type_is_parsed_into_its_field():
    words = "x.pth --to y --number 5 --kind b --bits 8 --quiet --json --share 0.25 --words one two".split()
    assert parsed(*words) == Outer("y", "x.pth", 5, "b", 8, True, "-", Inner(0.25, ("one", "two")))
    assert parsed("--file", "x.pth", "--to", "y", "-n", "5") == Outer("y", "x.pth", 5)


@pytest.mark.parametrize("words", ["", "--to y --number much", "--to y --kind c", "--to y --bits 5"])
def test_what_the_type_forbids_is_refused(words):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(*words.split())


def test_a_command_may_call_a_flag_otherwise():
    assert parsed("--to", "y", "--count-of", "5", renamed={"--number": "--count-of"}).count == 5


def test_help_has_defaults_and_groups():
    parser = argparse.ArgumentParser()
    add_flags(parser, Outer)
    text = parser.format_help()
    assert "how many (default 3)" in text and "inside:" in text and "untold" not in text


WORD = st.text("ab c.*'é", min_size=1, max_size=6)
INNER = st.builds(Inner, st.floats(0, 1), st.lists(WORD, max_size=3).map(tuple))


@given(
    st.builds(
        Outer,
        to=WORD,
        file=st.none() | WORD,
        count=st.integers(0, 9),
        kind=st.sampled_from([None, "a", "b"]),
        bits=st.sampled_from([None, 4, 8]),
        quiet=st.booleans(),
        json=st.none() | WORD,
        inner=INNER,
    )
)
def test_the_words_of_options_give_them_again(options):
    parser = argparse.ArgumentParser()
    add_flags(parser, Outer)
    assert options_from(parser.parse_args(words_from(options)), Outer) == options


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_can_be_taken_in_and_help_all_has_every_flag(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = command_of(name)
    shown = run(*name.split(), "--help-all")
    flags = {flag for action in parser_of(name, command)._actions for flag in action.option_strings}
    assert shown.code == 0 and all(flag in shown.out for flag in flags - {"--local_rank", "--local-rank", "--device"})
    brief = parser_of(name, command).format_help()
    assert max(map(len, brief.splitlines())) <= 80 and len(brief.splitlines()) <= 60
    assert len(re.findall(r"^  --\w", brief, re.MULTILINE)) <= 25


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_fit_80_columns_and_are_the_same_to_a_shell(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = command_of(name)
    lines = command.EXAMPLES.replace("\\\n", "").splitlines()
    written = [re.sub(r" {2,}\(.*", "", line).split() for line in lines if line.startswith("  swin-quant")]
    joined = parser_of(name, command).format_help().replace("\\\n", "")
    assert [line.split() for line in joined.splitlines() if line.startswith("  swin-quant")] == written
