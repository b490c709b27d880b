"""Flags made from a dataclass: what is parsed is what the dataclass holds, by type, default and place."""

import argparse
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from swin_quant.cli.flags import Flag, Group, add_flags, options_from


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
