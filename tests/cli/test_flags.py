"""What is advised can be done: every flag that a message or a document names is one of a command's."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.cli import COMMANDS, GROUPS
from swin_quant.cli.session import FRONT_DOOR, command_of, parser_of, words_of

ROOT = Path(__file__).parents[2]
PARSERS = {name: parser_of(name, command_of(name)) for name in (*COMMANDS, FRONT_DOOR)}
FLAGS = {name: set(parser._option_string_actions) for name, parser in PARSERS.items()}
SCRIPTS = {
    "main.py": FRONT_DOOR,
    "calibrate.py": "calibrate",
    "qat_finetune.py": "finetune",
    "export_ft.py": "ft export",
}
OURS = {"--version"}.union(*FLAGS.values())
OTHERS = {
    "torchrun": {"--nproc_per_node", "--master_port"},
    "trtexec": {"--onnx", "--saveEngine", "--stronglyTyped", "--profilingVerbosity", "--memPoolSize",
                "--timingCacheFile", "--fp16", "--int8"},
    "pip": {"--upgrade", "--index-url", "--no-deps"},
    "ruff": {"--fix"},
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
OF_BENCHMARKS = {
    flag
    for script in (ROOT / "benchmarks").glob("*.py")
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)', script.read_text(encoding="utf-8"))
}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FILES = [*DOCUMENTS, *sorted((ROOT / "swin_quant").rglob("*.py"))]
BY_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def texts(path):
    """(line, text) of a document, or of the string literals of a module: what an f-string puts in is `{}`."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, content
        return
    nodes = list(ast.walk(ast.parse(content)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def command_and_words(line):
    """The command of ours that a line starts, and the words after it; (None, ...) where it starts none."""
    words = re.split(r"\s{2,}[(#]|\s#\s", line.strip())[0].split()
    for place, word in enumerate(words):
        if word in SCRIPTS:
            return SCRIPTS[word], words[place + 1 :]
        if word in ("swin-quant", "swin_quant") and words[place + 1 :]:
            size = 2 if words[place + 1] in GROUPS else 1
            return " ".join(words[place + 1 : place + 1 + size]), words[place + 1 + size :]
    return (words[0], words[1:]) if words and words[0] in PARSERS else (None, words)


@BY_FILE
def test_every_flag_that_is_named_is_one(path):
    known = OURS.union(OF_BENCHMARKS, *OTHERS.values())
    assert [(line, flag) for line, text in texts(path) for flag in FLAG.findall(text) if flag not in known] == []


COMMAND_LINE = ("cli", "ft", "quantize.py")  # the last makes commands
LIBRARY = [path for path in FILES if path.suffix == ".py" and not {path.parent.name, path.name} & set(COMMAND_LINE)]
FIELD = re.compile(r"‹([a-z][a-z0-9_]*)›")


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_speaks_of_fields_and_not_of_flags(path):
    """Whoever asks has words of his own for them: the command line has flags, Python has arguments."""
    others = set().union(*OTHERS.values())
    said = [(line, re.sub("`[^`]*`", "", text)) for line, text in texts(path) if not text.startswith("swin-quant ")]
    assert [(line, flag) for line, text in said for flag in FLAG.findall(text) if flag not in others] == []


def test_every_field_is_called_something_by_a_command():
    words = {field for name, parser in PARSERS.items() for field in words_of(parser, command_of(name))}
    assert {field for path in LIBRARY for field in fields_said(path)} - words == set()


def fields_said(path):
    """The fields in errors and messages of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith("Error") or name in ("info", "warning"):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield from (field for part in parts if isinstance(part, str) for field in FIELD.findall(part))


@BY_FILE
def test_a_quoted_command_has_the_flags_that_are_named_with_it(path):
    wrong = []
    for line, text in texts(path):
        for quoted in [text] * text.startswith("swin-quant ") + re.findall(r"`([^`\n]+)`", text):
            command, words = command_and_words(quoted)
            wrong += [(line, command, f) for f in FLAG.findall(" ".join(words)) if f not in FLAGS.get(command, {f})]
    assert wrong == []


def shell_lines(path):
    """The commands of ours in bash blocks and in examples of --help, lines that go on joined."""
    for _, text in texts(path):
        blocks = [text] if text.startswith("examples:") else re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                command, words = command_and_words(line)
                if command and not line.startswith("#"):
                    yield command, words


@pytest.mark.parametrize("path", [path for path in FILES if any(shell_lines(path))], ids=lambda path: path.name)
def test_commands_that_are_shown_can_be_given(path):
    for command, words in shell_lines(path):
        words = shlex.split(" ".join(words).split(" > ")[0])
        if words[:1] == ["--help"]:
            continue
        assert command in PARSERS, (command, words)
        if "..." in words:
            assert {word for word in words if word.startswith("--")} <= FLAGS[command], (command, words)
            continue
        try:
            PARSERS[command].parse_args(words)
        except UsageError as error:
            pytest.fail(f"{path.name}: {command} {shlex.join(words)}: {error}")
