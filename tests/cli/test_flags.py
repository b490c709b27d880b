"""Every flag that a message or a document names is a flag of a command, so that advice can be followed."""

import ast
import re
import shlex

import pytest
from shown import FILES, PARSERS, ROOT, command_and_words, place, shell_lines, texts

from swin_quant.base.errors import UsageError
from swin_quant.cli.front_door_flags import FrontDoorParser

FRONT_DOOR = set(FrontDoorParser()._option_string_actions)
FLAGS = {name: command.flags | {"--help"} for name, command in PARSERS.items()}
OURS = {"--version", *FRONT_DOOR}.union(*FLAGS.values())
OTHERS = {
    "torchrun": {"--nproc_per_node", "--master_port"},
    "trtexec": {"--onnx", "--saveEngine", "--stronglyTyped", "--profilingVerbosity", "--memPoolSize",
                "--timingCacheFile", "--fp16", "--int8"},
    "pip": {"--upgrade", "--index-url", "--no-deps", "--force-reinstall"},
    "ruff": {"--fix"},
    "curl": {"--data-binary"},
    "ours": {"--no-"},  # in front of a word that says no to a flag
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
OF_SCRIPTS = {
    flag
    for folder in ("benchmarks", "scripts", "tools/cuda")
    for script in (ROOT / folder).glob("*.py")
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)', script.read_text(encoding="utf-8"))
}


def said(paths=FILES):
    """(place, text) of every text in these files."""
    return ((f"{place(path)}:{line}", text) for path in paths for line, text in texts(path))


def test_every_flag_that_is_named_is_one():
    known = OURS.union(OF_SCRIPTS, *OTHERS.values())
    assert [(where, flag) for where, text in said() for flag in FLAG.findall(text) if flag not in known] == []


COMMAND_LINE = ("cli", "ft", "verbs", "quantize.py")  # quantize.py composes commands
LIBRARY = [path for path in FILES if path.suffix == ".py" and not {*path.parts} & set(COMMAND_LINE)]
FIELD = re.compile(r"‹([a-z][a-z0-9_]*)›")


def test_the_library_speaks_of_fields_and_not_of_flags():
    """Each caller has its own words for a field: the command line has flags, Python has arguments."""
    others = set().union(*OTHERS.values())
    ours = [(where, re.sub("`[^`]*`", "", text)) for where, text in said(LIBRARY) if not text.startswith("swin-quant ")]
    ours = [(where, text) for where, text in ours if not FLAG.fullmatch(text)]  # the name of an argument's flag
    assert [(where, flag) for where, text in ours for flag in FLAG.findall(text) if flag not in others] == []


def test_every_field_is_called_something_by_a_command():
    words = {field for command in PARSERS.values() for field in command.words}
    assert {field for path in LIBRARY for field in fields_said(path)} - words == set()


def fields_said(path):
    """Yield the fields named in a module's errors and messages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith("Error") or name in ("info", "warning"):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield from (field for part in parts if isinstance(part, str) for field in FIELD.findall(part))


def test_a_quoted_command_has_the_flags_that_are_named_with_it():
    wrong = []
    for where, text in said():
        ours = text.splitlines() if text.startswith("swin-quant ") else []
        for quoted in [*ours, *re.findall(r"`([^`\n]+)`", text)]:
            command, words = command_and_words(quoted.partition("; curl ")[0])
            wrong += [(where, command, f) for f in FLAG.findall(" ".join(words)) if f not in FLAGS.get(command, {f})]
    assert wrong == []


def test_commands_that_are_shown_can_be_given():
    for where, command, words in [(place(path), *shown) for path in FILES for shown in shell_lines(path)]:
        words = shlex.split(" ".join(words).split(" > ")[0])
        if words[:1] == ["--help"]:
            continue
        assert command in PARSERS, (where, command, words)
        if "..." in words:
            assert {word for word in words if word.startswith("--")} <= FLAGS[command], (where, command, words)
            continue
        try:
            PARSERS[command].parse(words)
        except UsageError as error:
            pytest.fail(f"{where}: {command} {shlex.join(words)}: {error}")
