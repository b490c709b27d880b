"""A command is made of a function: its flags, types, defaults and help, and the command that a call is."""

import ast
import inspect
import shlex
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import PARSERS

from swin_quant.base.arguments import Fields, Parameter, as_command
from swin_quant.base.errors import UsageError
from swin_quant.cli.command import Command


@dataclass(frozen=True)
class Inner:
    """Parts.

    Args:
        file: what is read
        share: a share
        words: several
        hidden: Not for the command line.
    """

    file: str | None = None
    share: float = 0.5
    words: tuple[str, ...] = ()
    hidden: Annotated[int, Parameter(parse=False)] = 7


def made(
    to: Annotated[str, Parameter(name="--for")],
    inner: Annotated[Inner | None, Fields(Inner, "inside", ("file",))] = None,
    *,
    count: Annotated[int, Parameter(name="--number")] = 3,
    kind: Literal["a", "b"] | None = None,
    quiet_one: bool = False,
    own: Annotated[bool, Parameter(negative="--no-own")] = True,
    passes: str | list[Any] | None = None,
    inside: Annotated[Any, Parameter(parse=False)] = None,
) -> tuple[Any, ...]:
    """Make something of words.

    Args:
        to: where
        inner: The parts.
        count: how many
        kind: which
        quiet_one: say less
        own: with its own
        passes: a name
        inside: Python's alone.
    """
    return to, inner, count, kind, quiet_one, own, passes, inside


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: __import__("sys").modules[made.__module__])
    return Command("made")


def test_what_is_not_given_has_the_function_s_default(command):
    assert command.call(command.parse(["--for", "x"])) == ("x", None, 3, None, False, True, None, None)


def test_every_type_is_parsed_into_its_argument(command):
    words = "x.pth --for y --number 5 --kind b --quiet-one --share 0.25 --words one two --no-own --passes fast".split()
    inner = Inner("x.pth", 0.25, ("one", "two"))
    assert command.call(command.parse(words)) == ("y", inner, 5, "b", True, False, "fast", None)
    assert command.call(command.parse("--for y --file x --number 1 --number 5".split()))[1:3] == (Inner("x"), 5)


def test_what_cannot_be_read_is_one_line_with_the_way_to_the_help(command):
    for words, says in (
        ("", "--for"),
        ("--for y --number much", "much"),
        ("--for y --kind c", 'Choose from: "a", "b"'),
        ("--for y --nmber 5", "did you mean --number?"),
        ("--for y --number 99999999999", "beyond 2147483647"),
    ):
        with pytest.raises(UsageError) as raised:
            command.parse(words.split())
        assert says in str(raised.value) and "\n" not in str(raised.value)


def test_equal_dashes_are_no_likeness(command):
    with pytest.raises(UsageError, match="^Unknown option: --zzzz; see "):
        command.parse(["--for", "y", "--zzzz", "5"])


def test_a_misspelt_flag_is_named_before_the_one_that_is_missing(command):
    with pytest.raises(UsageError, match="^Unknown option: --forr; did you mean --for?"):
        command.parse(["--forr", "y"])


WORD = st.text("ab c.*'é", min_size=1, max_size=6)


@given(
    WORD,
    st.none() | st.builds(Inner, st.none() | WORD, st.floats(0, 1), st.lists(WORD, max_size=3).map(tuple)),
    st.integers(0, 9),
    st.sampled_from([None, "a", "b"]),
    st.booleans(),
    st.booleans(),
)
def test_the_command_of_a_call_makes_the_same_call(to, inner, count, kind, quiet, own):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.import_module", lambda name: __import__("sys").modules[made.__module__])
        command = Command("made")
    asked = {"to": to, "inner": inner, "count": count, "kind": kind, "quiet_one": quiet, "own": own}
    _, _, *words = shlex.split(as_command("made", made, **asked))
    expected = made(**{**asked, "inner": None if inner == Inner() else inner})
    assert command.call(command.parse(words)) == expected


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_flag_that_takes_values_needs_one(name):
    for argument in PARSERS[name].app.assemble_argument_collection():
        flag = next((word for word in argument.names if word.startswith("--")), None)
        if flag and flag != "--json" and "bool" not in str(argument.hint):  # `--json` alone prints
            with pytest.raises(UsageError, match=f"{flag} requires an argument; see swin-quant {name} --help"):
                PARSERS[name].parse([flag])


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_flag_has_its_help_and_every_argument_is_described(name):
    for argument in PARSERS[name].app.assemble_argument_collection():
        if argument.show:
            assert argument.parameter.help, argument.name


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_argument_is_read(name):
    """The function's own body reads it; a field of an argument is read somewhere in the package."""
    function = PARSERS[name].function
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    read = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert set(inspect.signature(function).parameters) - read == set()
    package = Path(inspect.getfile(Command)).parents[1]
    text = "".join(file.read_text() for file in package.rglob("*.py"))
    for hint in get_type_hints(function, include_extras=True).values():
        for note in get_args(hint)[1:]:
            if isinstance(note, Fields):
                assert [one.name for one in fields(note.kind) if f".{one.name}" not in text] == []


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_help_fits_80_columns_and_has_examples(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*name.split(), "--help").ok().out
    assert max(map(len, shown.splitlines())) <= 80 and f"swin-quant {name}" in shown
    assert "--verbose" in shown and "--quiet" in shown
    assert f"swin-quant {name} --help" in run(*name.split(), "--verbos").error(2)  # no abbreviations
    _, _, examples = shown.replace("\\\n", "").rpartition("╯\n")
    due = PARSERS[name].examples.splitlines()
    assert [line.split() for line in examples.splitlines()] == [line.split() for line in due]
